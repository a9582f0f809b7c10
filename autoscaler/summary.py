"""What an autoscaled run comes to: GPU hours against the service level, and its decisions one by one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lorrery.autoscaler.figures import Sample
from lorrery.autoscaler.rule import Decision, Reading

__all__ = ["Scaling", "ScalingRow", "ScalingSummary"]


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One look at the cluster, and what was decided; a line of the timeline.

    Attributes:
        seconds: since the start.
        group: of workers that was looked at; empty: there is one.
        desired: replicas that there should be from now on.
        recommended: by the metrics alone.
        values: of the metrics of all rules, in order; None: no value yet, or none of this group's rule.
    """

    seconds: float
    ready: int
    starting: int
    draining: int
    desired: int
    recommended: int
    num_requests_waiting: int
    num_requests_running: int
    kv_cache_usage_perc: float
    values: tuple[float | None, ...]
    group: str = ""

    @classmethod
    def of(
        cls,
        sample: Sample,
        decision: Decision,
        metrics: Sequence[str],
        readings: Mapping[str, Reading],
        group: str = "",
    ) -> "ScalingRow":
        """Make one of what there is and what was decided, given what the rule saw of it.

        A value for each replica is divided by those that said something.
        """
        num_ready = sample.num_ready
        shares = {
            metric: reading.value / max(num_ready if reading.replicas is None else reading.replicas, 1)
            if reading.is_total
            else reading.value
            for metric, reading in readings.items()
        }
        return cls(
            seconds=sample.at_seconds,
            ready=sample.num_ready,
            starting=sample.num_starting,
            draining=sample.num_draining,
            desired=decision.replicas,
            recommended=decision.recommended,
            num_requests_waiting=sample.num_requests_waiting,
            num_requests_running=sample.num_requests_running,
            kv_cache_usage_perc=sample.kv_cache_usage_perc / max(sample.num_ready, 1),
            values=tuple(shares.get(metric) for metric in metrics),
            group=group,
        )


@dataclass(frozen=True, slots=True)
class ScalingSummary:
    """Figures of a whole run.

    Attributes:
        gpu_hours: device hours times GPUs, from each worker's start until it has gone: its start-up and the end of
            what it runs count.
        replicas_mean: of those that serve, over time; so the two beside it.
        num_scale_ups: decisions for more workers.
        start_up_seconds: from a worker's start to its first plan; of groups the longest.
        ttft_seconds: the service level: time to the first token, and
        tpot_seconds: mean time of a further one.
        good_ratio: requests that had both, as a share of all. Those that failed had not.
    """

    gpu_hours: float
    replicas_min: int
    replicas_mean: float
    replicas_max: int
    num_scale_ups: int
    num_scale_downs: int
    start_up_seconds: float
    ttft_seconds: float
    tpot_seconds: float
    good_ratio: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """An autoscaled run.

    Attributes:
        metrics: of the rule, in its order; of several groups' rules each once.
        timeline: one row for each decision.
    """

    summary: ScalingSummary
    metrics: tuple[str, ...]
    timeline: Sequence[ScalingRow]
