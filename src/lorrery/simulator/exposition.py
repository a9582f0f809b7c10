"""A sample of a simulated cluster as Prometheus text under vLLM's metric names, with the cluster as one engine."""

from collections.abc import Sequence

from lorrery.scheduler.core.autoscaling.figures import Sample

__all__ = ["exposition"]


def exposition(sample: Sample, model: str) -> str:
    """Return the series of a sample.

    Args:
        sample: of the cluster.
        model: value of the label `model_name`.
    """
    labels = f'engine="0",model_name="{model}"'
    usage = sample.kv_cache_usage_perc / max(sample.num_ready, 1)
    lines: list[str] = []
    for name, value in (
        ("num_requests_running", float(sample.num_requests_running)),
        ("num_requests_waiting", float(sample.num_requests_waiting)),
        ("kv_cache_usage_perc", usage),
        ("gpu_cache_usage_perc", usage),
    ):
        lines += _series(name, "gauge", f"{{{labels}}}", value)
    for name, count in (
        ("prompt_tokens_total", sample.prompt_tokens),
        ("generation_tokens_total", sample.generation_tokens),
        ("request_success_total", sample.request_success),
    ):
        lines += _series(name, "counter", f"{{{labels}}}", float(count))
    for name, (bounds, counts) in sample.buckets.items():
        lines += _histogram(name, labels, bounds, counts, sample.sums.get(name, 0.0))
    return "\n".join([*lines, ""])


def _series(name: str, kind: str, labels: str, value: float) -> list[str]:
    return [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{labels} {value}"]


def _histogram(name: str, labels: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> list[str]:
    edges = [*map(str, bounds), "+Inf"]
    return [
        f"# TYPE vllm:{name} histogram",
        *(f'vllm:{name}_bucket{{{labels},le="{edge}"}} {count}' for edge, count in zip(edges, counts, strict=True)),
        f"vllm:{name}_count{{{labels}}} {counts[-1]}",
        f"vllm:{name}_sum{{{labels}}} {total}",
    ]
