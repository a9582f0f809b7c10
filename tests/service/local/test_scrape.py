"""What processes show adds up to one sample, whoever comes, goes and begins anew."""

import asyncio
from collections.abc import Mapping

import pytest

from lorrery.scheduler.core.autoscaling import Sample
from lorrery.service.local import autoscaler
from lorrery.service.local.autoscaler import ClusterScraper, Series, read_series

TEXT = """# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 3.0
# TYPE vllm:request_success counter
vllm:request_success_total{finished_reason="stop"} 4.0
vllm:request_success_total{finished_reason="abort"} 8.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.5"} 1.0
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 3.0
vllm:time_to_first_token_seconds_count 3.0
vllm:time_to_first_token_seconds_sum 4.5
# TYPE lorrery_worker_steps counter
lorrery_worker_steps_total 7.0
"""


def test_series_add_up_over_labels_but_bounds():
    assert read_series(TEXT) == {
        "vllm:num_requests_waiting": 5.0,
        "vllm:request_success_total": 4.0,
        "vllm:time_to_first_token_seconds_bucket{0.5}": 1.0,
        "vllm:time_to_first_token_seconds_bucket{+Inf}": 3.0,
        "vllm:time_to_first_token_seconds_count": 3.0,
        "vllm:time_to_first_token_seconds_sum": 4.5,
    }


def shown(tokens: float, ttft: tuple[float, float] = (0, 0), waiting: float = 0) -> Series:
    bucket = "vllm:time_to_first_token_seconds_bucket"
    return {
        "vllm:generation_tokens_total": tokens,
        "vllm:num_requests_waiting": waiting,
        f"{bucket}{{0.5}}": ttft[0],
        f"{bucket}{{+Inf}}": ttft[1],
    }


def test_counters_grow_over_workers_that_come_go_and_begin_anew(monkeypatch: pytest.MonkeyPatch):
    processes: dict[str, Series] = {}
    monkeypatch.setattr(autoscaler, "_get", lambda address: processes.get(address, {}))
    scraper = ClusterScraper()

    def look(serving: Mapping[str, Series], leaving: Mapping[str, Series], unplaced: float = 0.0) -> Sample:
        processes.clear()
        processes.update({**serving, **leaving, "scheduler": {"lorrery_scheduler_unplaced_requests": unplaced}})
        names = {name: name for name in serving}, {name: name for name in leaving}
        return asyncio.run(scraper.sample(0.0, *names, "scheduler", num_starting=1, workers_per_process=1))

    first = look({"a": shown(1000, (5, 9), waiting=2)}, {}, unplaced=3)
    assert (first.generation_tokens, first.num_requests_waiting, first.num_ready, first.num_starting) == (0, 5, 1, 1)
    second = look({"a": shown(1100, (6, 9)), "b": shown(50, (1, 2))}, {})
    assert second.generation_tokens == 150
    assert second.buckets["time_to_first_token_seconds"] == ([0.5], [2, 2])
    third = look({"a": shown(30)}, {"b": shown(80, waiting=9)})  # a began anew, b drains
    assert (third.generation_tokens, third.num_requests_waiting, third.num_draining) == (210, 0, 1)
    silent = look({"a": {}}, {})  # it does not answer
    assert (silent.generation_tokens, silent.num_ready) == (210, 0)
    assert look({"a": shown(40)}, {}).generation_tokens == 220


@pytest.mark.parametrize(("gpus", "usages", "usage"), [(1, [0.5], 0.5), (1, [0.5, 0.3], 0.8), (2, [0.9, 0.7], 0.8)])
def test_usage_is_a_process_mean_over_its_gpus_times_the_processes(
    monkeypatch: pytest.MonkeyPatch, gpus: int, usages: list[float], usage: float
):
    """A process shows the sum over its GPUs."""
    monkeypatch.setattr(
        autoscaler, "_get", lambda address: {} if address == "s" else {"vllm:kv_cache_usage_perc": usages[int(address)]}
    )
    serving = {f"worker-{number}": str(number) for number in range(len(usages))}
    sample = ClusterScraper().sample(0.0, serving, {}, "s", num_starting=0, workers_per_process=gpus)
    assert asyncio.run(sample).kv_cache_usage_perc == pytest.approx(usage)
