"""Samples of a simulated cluster as a scrape would see it: vLLM's series with vLLM's buckets.

TTFT counts when the first token is produced; a request and its queue time count when it ends, as on a worker's
`/metrics`. With several groups of workers each has its own scraper, limited to the group's series.
"""

from collections.abc import Mapping, Sequence

from lorrery.scheduler.core.autoscaling import HISTOGRAMS, Sample
from lorrery.scheduler.core.facts import Handler
from lorrery.service.telemetry.engine_series import vllm_series
from lorrery.service.telemetry.series import Histogram
from lorrery.simulator.fleet import Fleet
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import SimulatedWorker, StepSpan
from lorrery.vocabulary.units import PS_PER_SECOND

__all__ = ["Scraper"]


class Scraper:
    """Counts as a cluster's workers would; a subscriber of the simulation.

    Args:
        simulation: of the cluster.
        fleet: its workers, or those of a group.
        start_ps: origin of times.
    """

    def __init__(self, simulation: Simulation, fleet: Fleet, start_ps: int) -> None:
        self._simulation, self._fleet, self._start_ps = simulation, fleet, start_ps
        self._only = fleet.worker_names if fleet.name else None
        series = vllm_series(1)
        self._bounds = {name: series[name].buckets for name in HISTOGRAMS}
        self._histograms = {name: Histogram(bounds) for name, bounds in self._bounds.items()}
        self._num_ended = self._prompt_tokens = self._generation_tokens = 0

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {StepSpan: self._ran}

    def _ran(self, span: StepSpan, at_ps: int, member: object) -> None:
        """Count tokens and first tokens."""
        if self._only is not None and span.worker not in self._only:
            return
        self._generation_tokens += span.num_steps * span.num_decodes - len(span.silent)
        for chunk in span.plan.prefills:
            if not chunk.samples:
                continue
            self._generation_tokens += 1
            sequence = chunk.sequence
            if sequence.first_token_ps is None:
                self._prompt_tokens += sequence.prompt_tokens
                waited_ps = span.start_ps + span.first_ps - sequence.arrived_ps
                self._histograms["time_to_first_token_seconds"].observe(waited_ps / PS_PER_SECOND)

    def ended(self, request: SimulatedRequest) -> None:
        """Count an ended request."""
        if request.outcome == "finished" and (self._only is None or request.worker in self._only):
            self._num_ended += 1
            admitted_ps = request.first_admitted_ps
            assert admitted_ps is not None
            queued_ps = admitted_ps - request.arrived_ps
            self._histograms["request_queue_time_seconds"].observe(queued_ps / PS_PER_SECOND)

    def sample(self, at_ps: int) -> Sample:
        """Return what a scrape shows now; ended steps must be committed."""
        fleet, serving = self._fleet, self._fleet.serving()
        read = {name: histogram.read() for name, histogram in self._histograms.items()}
        cores = self._simulation.cores
        if self._only is None:
            num_waiting = sum([core.num_waiting for core in cores])
        else:
            num_waiting = fleet.num_waiting + sum([core.num_unplaced + core.num_held for core in cores])
        return Sample(
            at_seconds=(at_ps - self._start_ps) / PS_PER_SECOND,
            num_ready=fleet.num("ready"),
            num_starting=fleet.num("starting"),
            num_draining=fleet.num("draining"),
            num_requests_waiting=num_waiting,
            num_requests_running=sum([worker.replica.num_running for worker in serving]),
            kv_cache_usage_perc=_kv_usage(serving) / max(len(serving), 1) * fleet.num("ready"),
            request_success=self._num_ended,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            buckets={name: (self._bounds[name], counts) for name, (counts, _) in read.items()},
            sums={name: total for name, (_, total) in read.items()},
        )


def _kv_usage(workers: Sequence[SimulatedWorker]) -> float:
    """Return the sum of the used shares of the workers' KV pools."""
    total = 0.0
    for worker in workers:
        use = worker.replica.memory.block_use(worker.replica.running)
        if use is not None:
            total += use.used / max(1, use.used + use.cached + use.free)
        else:
            total += worker.replica.kv_tokens / max(1, worker.pool_tokens)
    return total


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
