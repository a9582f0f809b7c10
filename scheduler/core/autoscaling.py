"""The number of replicas: the algorithm of Kubernetes' HorizontalPodAutoscaler, and KEDA's scaling to zero.

    desired = ceil(current * value / target)        unchanged if |value / target - 1| <= tolerance

With several metrics the largest result counts. Further, as in the controller of Kubernetes 1.27 and later
(pkg/controller/podautoscaler/horizontal.go and replica_calculator.go):

* if a metric has no value, the others may scale up, not down (`computeReplicasForMetrics`);
* a value that is an average over replicas (`AverageValue` of HPA's Pods metrics) is taken over the replicas that
  report. Those that are starting, or started after the last scrape, count as 0 if the result is to scale up, and as the
  target if it is to scale down. `AverageValue` of External metrics, which KEDA creates, has no such correction;
* if no serving replica reports, such a value does not count and nothing changes, except that requests that wait for any
  replica (`num_requests_waiting`) may scale up: KEDA's external metric, without which no replica would come back;
* a value of the whole cluster (`Value`) multiplies the number of ready replicas;
* stabilisation: scaling up uses the smallest result of the last `scale_up.stabilization_seconds`, scaling down the
  largest of the last `scale_down.stabilization_seconds`;
* policies: within `period_seconds` at most so many replicas, or per cent of them, are added or removed, whichever is
  more.

HPA never scales to zero. With `min_replicas` = 0 KEDA's rule does: to no replicas once no metric was above 0 for
`cooldown_seconds`, and to one again as soon as one is.

The values of the metrics come from scraped samples of a cluster (`Window`). Names are those of vLLM's series without
`vllm:`. A gauge is the sum over serving workers, a rate is `sum(rate(series[window]))`, both with targets per replica;
a percentile is `histogram_quantile(p, sum by (le) (rate(series_bucket[window])))`, interpolated within its bucket as in
Prometheus. `lorrery up` and simulations use the same.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["MOST_REPLICAS", "Autoscaler", "Decision", "Direction", "Reading", "Rule"]

MOST_REPLICAS = 10_000
"""Upper bound on replicas; more are a mistake."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The current value of a metric.

    Attributes:
        value: sum over all replicas that report (`is_total`), or the cluster's own.
        is_total: whether the target is per replica.
        replicas: number of replicas that reported; fewer than serve now if some are newer. None: all that serve.
    """

    value: float
    is_total: bool
    replicas: int | None = None


@dataclass(frozen=True, slots=True)
class Direction:
    """How fast replicas may be added, or removed.

    Attributes:
        stabilization_seconds: for which results are remembered.
        max_pods: upper bound on replicas added or removed within a period; 0: no such policy.
        max_percent: the same, relative to the replicas at the start of the period; 0: no such policy. Without either,
            nothing changes in this direction.
        period_seconds: period of both policies.
    """

    stabilization_seconds: float
    max_pods: int
    max_percent: int
    period_seconds: float


@dataclass(frozen=True, slots=True)
class Rule:
    """The scaling rule.

    Attributes:
        targets: by metric; replicas are added if its value is above.
        min_replicas: 0 enables KEDA's scaling to zero and back.
        max_replicas: up to `MOST_REPLICAS`.
        tolerance: relative deviation from the target at which nothing changes.
        cooldown_seconds: time without any value above 0 before the last replica is removed.
    """

    targets: Mapping[str, float]
    min_replicas: int
    max_replicas: int
    tolerance: float
    scale_up: Direction
    scale_down: Direction
    cooldown_seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a decision.

    Attributes:
        replicas: replicas wanted from now on.
        recommended: by the metrics alone, before bounds, stabilisation and policies; up to `MOST_REPLICAS`.
        why: the metric that wants most replicas, and its value.
    """

    replicas: int
    recommended: int
    why: str


class Autoscaler:
    """Applies a rule repeatedly; remembers its results and changes.

    Args:
        rule: the rule.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._answers: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()
        self._active_at: float | None = None

    def decide(self, at_seconds: float, current: int, ready: int, readings: Mapping[str, Reading]) -> Decision:
        """Decide the number of replicas.

        Args:
            at_seconds: the current time, non-decreasing.
            current: replicas wanted so far, starting ones included.
            ready: of those, the ones that serve.
            readings: of every metric of the rule that has a value now. If one has none, no replica is removed.
        """
        rule = self.rule
        answers = {
            metric: self._recommend(readings[metric], target, current, ready)
            for metric, target in rule.targets.items()
            if metric in readings and _says_something(readings[metric], current, ready)
        }
        recommended, why = current, "no metric has a value"
        if answers:
            metric = max(answers, key=answers.__getitem__)
            recommended, value = answers[metric], readings[metric].value
            why = f"{metric} is {value:.4g}, target {rule.targets[metric]:.4g}{' each' * readings[metric].is_total}"
        is_active = any(reading.value > 0 for reading in readings.values())
        if readings and (is_active or self._active_at is None):
            self._active_at = at_seconds
        idle_seconds = 0.0 if self._active_at is None else at_seconds - self._active_at
        is_known = readings.keys() >= rule.targets.keys()
        least = max(rule.min_replicas, 1)
        missing = [name for name in rule.targets if name not in answers]
        if current == 0:
            replicas = least if is_active or rule.min_replicas else 0
        elif not rule.min_replicas and is_known and not is_active and idle_seconds >= rule.cooldown_seconds:
            replicas, why = 0, f"nothing for {idle_seconds:g} s"
        elif not answers:
            replicas = self._within_bounds(current)
        elif missing and recommended < current:
            replicas, why = self._within_bounds(current), f"{missing[0]} has no value, and the others want fewer"
        elif not least <= current <= rule.max_replicas:
            replicas = self._within_bounds(current)
        else:
            replicas = self._limited(self._stable(recommended, current, at_seconds), current, at_seconds)
        if replicas != current:
            self._changes.append((at_seconds, replicas - current))
        return Decision(replicas, recommended, why)

    def _within_bounds(self, replicas: int) -> int:
        return min(max(replicas, self.rule.min_replicas), self.rule.max_replicas)

    def _recommend(self, reading: Reading, target: float, current: int, ready: int) -> int:
        """Return the number of replicas that one metric wants."""
        tolerance = self.rule.tolerance
        if not reading.is_total:
            ratio = reading.value / target
            if abs(ratio - 1) <= tolerance:
                return current
            return _rounded_up(ratio * ready)
        if reading.replicas is not None:
            ready = min(ready, reading.replicas)
        if current == 0:
            return _rounded_up(reading.value / target)
        ratio = reading.value / (target * ready) if ready else math.inf
        if abs(ratio - 1) <= tolerance:
            return current
        num_starting = current - ready
        if num_starting <= 0:
            return _rounded_up(reading.value / target)
        # Starting replicas count as idle if the result is to scale up, and as exactly at the target if it is to scale
        # down.
        total = reading.value + (target * num_starting if ratio < 1 else 0.0)
        again = total / (target * current)
        if abs(again - 1) <= tolerance or (ratio > 1) != (again > 1):
            return current
        return _rounded_up(total / target)

    def _stable(self, recommended: int, current: int, at_seconds: float) -> int:
        """Apply the stabilisation windows; HPA's stabilizeRecommendationWithBehaviors."""
        up, down = self.rule.scale_up.stabilization_seconds, self.rule.scale_down.stabilization_seconds
        answers = self._answers
        if not answers:
            answers.append((at_seconds, current))  # so that a new rule removes no replica at once
        while answers and answers[0][0] <= at_seconds - max(up, down):
            answers.popleft()
        answers.append((at_seconds, recommended))
        lowest = min((one for at, one in answers if at > at_seconds - up), default=recommended)
        highest = max((one for at, one in answers if at > at_seconds - down), default=recommended)
        return min(max(current, lowest), highest)

    def _limited(self, wanted: int, current: int, at_seconds: float) -> int:
        """Apply policies and bounds; HPA's convertDesiredReplicasWithBehaviorRate."""
        rule = self.rule
        longest = max(rule.scale_up.period_seconds, rule.scale_down.period_seconds)
        while self._changes and self._changes[0][0] <= at_seconds - longest:
            self._changes.popleft()
        if wanted > current:
            before = current - self._changed_since(at_seconds - rule.scale_up.period_seconds)
            own = rule.scale_up
            most = max(
                before + own.max_pods if own.max_pods else current,
                math.ceil(before * (100 + own.max_percent) / 100) if own.max_percent else current,
            )
            return min(wanted, max(most, current), rule.max_replicas)
        if wanted < current:
            before = current - self._changed_since(at_seconds - rule.scale_down.period_seconds)
            own = rule.scale_down
            fewest = min(
                before - own.max_pods if own.max_pods else current,
                before * (100 - own.max_percent) // 100 if own.max_percent else current,
            )
            return max(wanted, min(fewest, current), rule.min_replicas, 1)
        return current

    def _changed_since(self, since_seconds: float) -> int:
        """Return the net change in replicas since that time."""
        return sum(change for at, change in self._changes if at > since_seconds)


def _says_something(reading: Reading, current: int, ready: int) -> bool:
    """Return whether a value counts: from serving replicas, of the cluster, or requests that wait for any replica."""
    if not reading.is_total or not current:
        return True
    return reading.value > 0 if reading.replicas == 0 else ready > 0


def _rounded_up(replicas: float) -> int:
    return math.ceil(min(replicas, MOST_REPLICAS))


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
