"""The part of a report on scaling: a few lines, and the timeline as CSV."""

import csv
from io import StringIO

from lorrery.scheduler.core.autoscaling.summary import Scaling

__all__ = ["scaling_csv", "scaling_lines"]

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
