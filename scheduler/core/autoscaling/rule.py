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
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

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
