"""The part of a report on scaling: its figures, a few lines of text, and the timeline as CSV."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

__all__ = ["Scaling", "ScalingRow", "ScalingSummary", "scaling_csv", "scaling_lines"]

_COLUMNS = (
    "seconds",
    "ready",
    "starting",
    "draining",
    "desired",
    "recommended",
    "num_requests_waiting",
    "num_requests_running",
    "kv_cache_usage_perc",
)


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


def scaling_csv(scaling: Scaling) -> str:
    """Return the timeline, one line per decision; the rule's metrics follow as `metric:NAME`, per worker process.

    With several groups of workers, `group` comes last.
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    groups = ("group",) * any(row.group for row in scaling.timeline)
    writer.writerow((*_COLUMNS, *(f"metric:{metric}" for metric in scaling.metrics), *groups))
    for row in scaling.timeline:
        figures = (getattr(row, name) for name in _COLUMNS)
        values = ("" if value is None else value for value in row.values)
        group = (getattr(row, name) for name in groups)
        writer.writerow([f"{one:.6g}" if isinstance(one, float) else one for one in (*figures, *values, *group)])
    return text.getvalue()


def scaling_lines(scaling: Scaling) -> list[tuple[str, str]]:
    """Return the most important figures, each with its label."""
    own = scaling.summary
    changes = f"{own.num_scale_ups:,} times up, {own.num_scale_downs:,} times down"
    used = (
        f"{own.gpu_hours:,.2f} GPU hours of workers that start, serve or drain; {own.replicas_min} to"
        f" {own.replicas_max} worker processes serve, {own.replicas_mean:.2f} on average; {changes}; a start takes"
        f" {own.start_up_seconds:.1f} s"
    )
    level = f"TTFT up to {own.ttft_seconds:g} s and TPOT up to {own.tpot_seconds * 1e3:g} ms"
    return [("scaling", used), ("", f"service level: {own.good_ratio:.2%} of requests with {level}")]
