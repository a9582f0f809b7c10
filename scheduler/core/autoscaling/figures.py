"""Computes a metric's value from scraped samples of a cluster: gauges, rates and percentiles over a window.

Names are those of vLLM's series without `vllm:`. A gauge is the sum over serving workers, a rate is
`sum(rate(series[window]))`, both with targets per replica; a percentile is `histogram_quantile(p, sum by (le)
(rate(series_bucket[window])))`, interpolated within its bucket as in Prometheus.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lorrery.scheduler.core.autoscaling.rule import Reading

__all__ = ["COUNTED", "GAUGES", "METRICS", "PERCENTILES", "RATES", "Sample", "Window", "quantile"]

GAUGES = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc")
RATES = {
    "request_success_per_second": "request_success",
    "prompt_tokens_per_second": "prompt_tokens",
    "generation_tokens_per_second": "generation_tokens",
}
"""Metric -> counter of the rate."""
HISTOGRAMS = ("time_to_first_token_seconds", "request_queue_time_seconds")
PERCENTILES = {f"{series}_p{share}": (series, share / 100) for series in HISTOGRAMS for share in (50, 90, 95, 99)}
"""Metric -> histogram, and share of the values below it."""
COUNTED = ("num_requests_waiting", "num_requests_running", *RATES)
"""Metrics that are summed over the workers of a process."""
METRICS = (*GAUGES, *RATES, *PERCENTILES)


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of a cluster.

    Attributes:
        at_seconds: time of the scrape.
        num_ready: replicas that serve.
        num_starting: replicas that load their weights.
        num_draining: replicas that finish their sequences before they leave.
        num_requests_waiting: requests in the queues of workers, and requests that wait for a worker.
        num_requests_running: sequences in the batches of serving workers.
        kv_cache_usage_perc: mean share of a worker's KV pool in use, times the number of serving replicas.
        request_success: requests finished by themselves, since the start.
        prompt_tokens: of prompts whose first token was produced, since the start.
        generation_tokens: output tokens, since the start.
        buckets: histogram -> bounds, and cumulative counts up to each bound; the last count is for no bound.
        sums: histogram -> sum of its values.
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
        """Replicas wanted: those that serve and those that start."""
        return self.num_ready + self.num_starting


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return a percentile of a histogram, as Prometheus' `histogram_quantile`; None: the histogram is empty.

    Args:
        share: share of the values that are below the result.
        bounds: shape (n,), upper bounds, ascending.
        counts: shape (n + 1,), cumulative counts up to each bound; the last is the total.
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
    """The visible samples of the last `seconds`.

    Args:
        seconds: window of rates and percentiles.
        delay_seconds: delay after which a sample becomes visible.
    """

    def __init__(self, seconds: float, delay_seconds: float = 0.0) -> None:
        self._seconds, self._delay_seconds = seconds, delay_seconds
        self._samples: deque[Sample] = deque()
        self._coming: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """Add a sample, later than the previous ones; drop samples that have left the window."""
        self._coming.append(sample)
        self.pass_until(sample.at_seconds)

    def pass_until(self, at_seconds: float) -> None:
        """Advance time: samples become visible after their delay."""
        samples = self._samples
        while self._coming and self._coming[0].at_seconds + self._delay_seconds <= at_seconds:
            sample = self._coming.popleft()
            samples.append(sample)
            while len(samples) > 2 and samples[1].at_seconds <= sample.at_seconds - self._seconds:
                samples.popleft()

    def read(self, metric: str) -> Reading | None:
        """Return a metric's value at the last visible sample; None: it has none.

        A rate has none before there are two samples. The percentile of an empty histogram is 0, as in a query that ends
        with `or vector(0)`, so that a time without requests does not prevent scaling down.
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
        """Return the metrics that have a value at the last sample, by name."""
        readings = {metric: self.read(metric) for metric in metrics}
        return {metric: reading for metric, reading in readings.items() if reading is not None}
