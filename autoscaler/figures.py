"""From what one scrapes of a cluster to the value of a metric: gauges, rates and percentiles over a window.

Names are those of vLLM's series without `vllm:`. A gauge is the sum over the workers that serve, a rate is
`sum(rate(series[window]))`, both for each replica; a percentile is `histogram_quantile(p, sum by (le)
(rate(series_bucket[window])))`, interpolated within its bucket as Prometheus does.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lorrery.autoscaler.rule import Reading

__all__ = ["COUNTED", "GAUGES", "METRICS", "PERCENTILES", "RATES", "Sample", "Window", "quantile"]

GAUGES = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc")
RATES = {
    "request_success_per_second": "request_success",
    "prompt_tokens_per_second": "prompt_tokens",
    "generation_tokens_per_second": "generation_tokens",
}
"""Metric -> the counter whose rate it is."""
HISTOGRAMS = ("time_to_first_token_seconds", "request_queue_time_seconds")
PERCENTILES = {f"{series}_p{share}": (series, share / 100) for series in HISTOGRAMS for share in (50, 90, 95, 99)}
"""Metric -> its histogram, and which share of the values is below it."""
COUNTED = ("num_requests_waiting", "num_requests_running", *RATES)
"""Metrics that add up over the workers of a process."""
METRICS = (*GAUGES, *RATES, *PERCENTILES)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one scrape of a cluster shows.

    Attributes:
        at_seconds: when.
        num_ready: replicas that serve.
        num_starting: replicas that load their weights.
        num_draining: replicas that end what they have, and then leave.
        num_requests_waiting: requests in the queues of workers, and those that wait for a worker.
        num_requests_running: sequences in batches of workers that serve.
        kv_cache_usage_perc: the mean share of a worker's KV pool in use, times the replicas that serve.
        request_success: requests that have ended by themselves, since the start; so the two that follow.
        prompt_tokens: of prompts whose first token has come.
        generation_tokens: tokens made.
        buckets: by histogram: its bounds, and how many values so far are up to each; the last has no bound.
        sums: by histogram: of its values so far.
    """

    at_seconds: float
    num_ready: int
    num_starting: int = 0
    num_draining: int = 0
    num_requests_waiting: int = 0
    num_requests_running: int = 0
    kv_cache_usage_perc: float = 0.0
    request_success: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    buckets: Mapping[str, tuple[Sequence[float], Sequence[int]]] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_replicas(self) -> int:
        """Replicas that are asked for: those that serve, and those that start."""
        return self.num_ready + self.num_starting


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return a percentile of a histogram, as Prometheus' `histogram_quantile`; None: it has no value.

    Args:
        share: of the values that are below.
        bounds: shape (n,), upper bounds, ascending.
        counts: shape (n + 1,), how many values are up to each bound; the last counts all.
    """
    total = counts[-1]
    if total <= 0:
        return None
    rank = share * total
    bucket = bisect_left(counts, rank)
    if bucket >= len(bounds):
        return bounds[-1]
    below, start = (counts[bucket - 1], bounds[bucket - 1]) if bucket else (0, 0.0)
    return start + (bounds[bucket] - start) * (rank - below) / (counts[bucket] - below)


class Window:
    """The samples of the last seconds, as far as they are seen.

    Args:
        seconds: of rates and percentiles.
        delay_seconds: after which a sample is seen.
    """

    def __init__(self, seconds: float, delay_seconds: float = 0.0) -> None:
        self._seconds, self._delay_seconds = seconds, delay_seconds
        self._samples: deque[Sample] = deque()
        self._coming: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """Take a sample, later than the ones before; forget what the window does not begin with any more."""
        self._coming.append(sample)
        self.pass_until(sample.at_seconds)

    def pass_until(self, at_seconds: float) -> None:
        """Let time pass: samples that are seen by then count."""
        samples = self._samples
        while self._coming and self._coming[0].at_seconds + self._delay_seconds <= at_seconds:
            sample = self._coming.popleft()
            samples.append(sample)
            while len(samples) > 2 and samples[1].at_seconds <= sample.at_seconds - self._seconds:
                samples.popleft()

    def read(self, metric: str) -> Reading | None:
        """Return a metric's value at the last sample that is seen; None: it has none.

        A rate has none before there are two samples. A percentile of nothing is 0, as where a query ends with
        `or vector(0)`: a time without requests keeps nobody from scaling down.
        """
        if not self._samples:
            return None
        first, last = self._samples[0], self._samples[-1]
        if metric in GAUGES:
            return Reading(float(getattr(last, metric.replace("gpu_", "kv_"))), True, last.num_ready)
        elapsed = last.at_seconds - first.at_seconds
        if elapsed <= 0:
            return None
        if metric in RATES:
            counter = RATES[metric]
            return Reading((getattr(last, counter) - getattr(first, counter)) / elapsed, True, last.num_ready)
        series, share = PERCENTILES[metric]
        bounds, now = last.buckets[series]
        counts = [one - before for one, before in zip(now, first.buckets[series][1], strict=True)]
        return Reading(quantile(share, bounds, counts) or 0.0, is_total=False)

    def read_all(self, metrics: Iterable[str]) -> dict[str, Reading]:
        """Return by name those of some metrics that have a value at the last sample."""
        readings = {metric: self.read(metric) for metric in metrics}
        return {metric: reading for metric, reading in readings.items() if reading is not None}
