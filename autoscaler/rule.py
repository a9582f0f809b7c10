"""How many replicas there should be: the algorithm of Kubernetes' HorizontalPodAutoscaler, and KEDA's way to zero.

    desired = ceil(current * value / target)        unless |value / target - 1| <= tolerance: then it stays

With several metrics the largest answer counts. Then, as in the controller of Kubernetes 1.27 and later
(pkg/controller/podautoscaler/horizontal.go and replica_calculator.go):

* where a metric has no value, the others may scale up, not down (`computeReplicasForMetrics`);
* a value that is an average over replicas (`AverageValue` of HPA's Pods metrics) is taken over the replicas that say
  something. Those that still start, or came after the last scrape, count as 0 where the answer is to scale up, and as
  the target where it is to scale down. `AverageValue` of External metrics, which KEDA makes, has no such correction;
* where no replica that serves says anything, such a value is none, and nothing changes, but that what waits for any
  replica (`num_requests_waiting`) may want more: KEDA's external metric, without which none would come back;
* a value that is the cluster's (`Value`) multiplies the replicas that are ready;
* stabilisation: scaling up takes the smallest answer of the last `scale_up.stabilization_seconds`, scaling down the
  largest of the last `scale_down.stabilization_seconds`;
* policies: within `period_seconds` no more than so many replicas or per cent come or go, whichever is more.

HPA never goes to zero. With `min_replicas` = 0 KEDA's rule does: no replicas once no metric was above 0 for
`cooldown_seconds`, and one again as soon as one is.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MOST_REPLICAS", "Autoscaler", "Decision", "Direction", "Reading", "Rule"]

MOST_REPLICAS = 10_000
"""That may be asked for: more are a mistake."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A metric's value now.

    Attributes:
        value: of all replicas that say something together (`is_total`), or the cluster's own.
        is_total: whether the target is for each replica.
        replicas: that said something; of those that serve now others may be newer. None: all that serve.
    """

    value: float
    is_total: bool
    replicas: int | None = None


@dataclass(frozen=True, slots=True)
class Direction:
    """How fast replicas may come, or go.

    Attributes:
        stabilization_seconds: for which answers are remembered.
        max_pods: that come or go within a period; 0: this policy is not there.
        max_percent: of those at the beginning of the period; 0: this policy is not there. Without either nothing
            moves in this direction.
        period_seconds: for which both hold.
    """

    stabilization_seconds: float
    max_pods: int
    max_percent: int
    period_seconds: float


@dataclass(frozen=True, slots=True)
class Rule:
    """What is wanted.

    Attributes:
        targets: by metric; replicas are added where its value is above.
        min_replicas: 0: KEDA's way to zero and back.
        max_replicas: up to `MOST_REPLICAS`.
        tolerance: by which a value may miss its target, as a share of it.
        cooldown_seconds: without any value above 0, before the last replica goes.
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
    """What to do.

    Attributes:
        replicas: that there should be from now on.
        recommended: by the metrics alone, before bounds, stabilisation and policies; up to `MOST_REPLICAS`.
        why: the metric that wants most, and its value.
    """

    replicas: int
    recommended: int
    why: str


class Autoscaler:
    """Applies a rule, time after time; remembers its answers and what it did.

    Args:
        rule: to apply.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._answers: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()
        self._active_at: float | None = None

    def decide(self, at_seconds: float, current: int, ready: int, readings: Mapping[str, Reading]) -> Decision:
        """Say how many replicas there should be.

        Args:
            at_seconds: now; never less than in the call before.
            current: replicas that are asked for, those that start included.
            ready: of those, the ones that serve.
            readings: of every metric of the rule that has a value now. Where one has none, no replica goes.
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
        """Return what one metric wants."""
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
        # Those that start are taken as idle where the answer is more, and as just right where it is fewer.
        total = reading.value + (target * num_starting if ratio < 1 else 0.0)
        again = total / (target * current)
        if abs(again - 1) <= tolerance or (ratio > 1) != (again > 1):
            return current
        return _rounded_up(total / target)

    def _stable(self, recommended: int, current: int, at_seconds: float) -> int:
        """Return what the answers of the windows have in common; HPA's stabilizeRecommendationWithBehaviors."""
        up, down = self.rule.scale_up.stabilization_seconds, self.rule.scale_down.stabilization_seconds
        answers = self._answers
        if not answers:
            answers.append((at_seconds, current))  # so that a rule that begins lets nobody go at once
        while answers and answers[0][0] <= at_seconds - max(up, down):
            answers.popleft()
        answers.append((at_seconds, recommended))
        lowest = min((one for at, one in answers if at > at_seconds - up), default=recommended)
        highest = max((one for at, one in answers if at > at_seconds - down), default=recommended)
        return min(max(current, lowest), highest)

    def _limited(self, wanted: int, current: int, at_seconds: float) -> int:
        """Return what policies and bounds allow; HPA's convertDesiredReplicasWithBehaviorRate."""
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
        """Return by how much there are more than at that time."""
        return sum(change for at, change in self._changes if at > since_seconds)


def _says_something(reading: Reading, current: int, ready: int) -> bool:
    """Tell whether a value is one of replicas that serve, of the cluster, or what waits for any replica."""
    if not reading.is_total or not current:
        return True
    return reading.value > 0 if reading.replicas == 0 else ready > 0


def _rounded_up(replicas: float) -> int:
    return math.ceil(min(replicas, MOST_REPLICAS))
