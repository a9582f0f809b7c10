"""The results of an autoscaled run: GPU hours and service level, and the decisions one by one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lorrery.scheduler.core.autoscaling.figures import Sample
from lorrery.scheduler.core.autoscaling.rule import Decision, Reading

__all__ = ["Scaling", "ScalingRow", "ScalingSummary"]


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One decision with the state that it was based on; a row of the timeline.

    Attributes:
        seconds: since the start.
        group: group of workers; empty: there is only one.
        desired: replicas wanted from now on.
        recommended: by the metrics alone.
        values: of the metrics of all rules, in order; None: no value yet, or not a metric of this group's rule.
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
        """Build a row from a sample, the decision, and the readings that the rule used.

        Totals are divided by the number of replicas that reported.
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
    """Summary of a whole run.

    Attributes:
        gpu_hours: device hours times GPUs, from each worker's start until it is gone, including its start-up and the
            end of its requests.
        replicas_mean: serving replicas, over time; `replicas_min` and `replicas_max` likewise.
        num_scale_ups: number of decisions for more workers.
        start_up_seconds: from a worker's start to its first plan; the longest of all groups.
        ttft_seconds: service level: time to the first token.
        tpot_seconds: service level: mean time per further token.
        good_ratio: share of all requests that met both; failed requests did not.
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
        metrics: of the rule, in its order; with several groups' rules, each metric once.
        timeline: one row per decision.
    """

    summary: ScalingSummary
    metrics: tuple[str, ...]
    timeline: Sequence[ScalingRow]
