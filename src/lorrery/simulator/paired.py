"""Differences of a simulation to the recorded run of the same requests, request by request.

A request that completed in both makes a pair; its difference is simulated less recorded. The interval of a mean
difference is of the traffic's own variation: how far the mean would move if as much traffic of the same kind came
again. Neighbours share a queue, so that their differences are not independent: the variance is that of slow waves over
the run (`view.reports.spread`), with Student's t. What the simulation leaves out, such as gaps between a live worker's
steps, is in the difference and not in the interval.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final, TextIO

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.outcome import Labels, OutcomeTable
from lorrery.view.reports.spread import estimate
from lorrery.vocabulary.intervals import student

Floats = npt.NDArray[np.float64]

METRICS: Final = ("ttft", "tpot", "e2e")
_MOST_COSINES: Final = 12
_FEWEST_PAIRS: Final = 4


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The difference of one metric over a group of requests.

    Attributes:
        group: `all`, `tenant` or `adapter`.
        name: of the tenant or adapter.
        metric: of `METRICS`.
        num_pairs: requests that completed in both, with a value in both.
        recorded_ms: mean of the recorded run; NaN without a pair.
        simulated_ms: mean of the simulation.
        difference_ms: mean of simulated less recorded.
        low_ms: lower end of its 95 % interval; NaN with fewer than four pairs.
        high_ms: upper end.
        faster_ratio: share of the pairs that are shorter simulated.
        slower_ratio: share that are longer.
    """

    group: str
    name: str
    metric: str
    num_pairs: int
    recorded_ms: float
    simulated_ms: float
    difference_ms: float
    low_ms: float
    high_ms: float
    faster_ratio: float
    slower_ratio: float


def values_ms(table: OutcomeTable) -> dict[str, Floats]:
    """Return each metric of each request, NaN for those without it; times count from the arrival."""
    first, last = (
        np.where(table.completed, at, np.nan) for at in (table.first_token_seconds, table.last_token_seconds)
    )
    tokens = np.where(table.output_tokens > 1, table.output_tokens - 1.0, np.nan)
    sent = table.sent_seconds
    return {"ttft": (first - sent) * 1e3, "tpot": (last - first) / tokens * 1e3, "e2e": (last - sent) * 1e3}


def _values_by_index(table: OutcomeTable, num_requests: int) -> dict[str, Floats]:
    found = {}
    for name, values in values_ms(table).items():
        found[name] = np.full(num_requests, np.nan)
        found[name][table.index] = values
    return found


def paired(recorded: OutcomeTable, simulated: OutcomeTable) -> tuple[PairedDifference, ...]:
    """Compare two runs of the same requests: all of them, and those of each tenant and adapter if there are several.

    Args:
        recorded: in order of arrival, the index of each being its row.
        simulated: the same requests by index, or some of them, if the run was interrupted.
    """
    ours, theirs = values_ms(recorded), _values_by_index(simulated, len(recorded))
    groups: list[tuple[str, str, npt.NDArray[np.int64]]] = [("all", "", np.arange(len(recorded)))]
    for kind, column in (("tenant", recorded.tenant_id), ("adapter", recorded.adapter_id)):
        groups += _groups(kind, column)
    return tuple(
        _difference(kind, name, metric, ours[metric][rows], theirs[metric][rows])
        for kind, name, rows in groups
        for metric in METRICS
    )


def _groups(kind: str, column: Labels[str] | Labels[str | None]) -> Iterable[tuple[str, str, npt.NDArray[np.int64]]]:
    """Return kind, name and rows of each group, the largest first; nothing if there is one only."""
    found = [(kind, name or "", rows) for name, rows in column.rows_of()]
    return sorted(found, key=lambda one: (-len(one[2]), one[1])) if len(found) > 1 else ()


def _difference(group: str, name: str, metric: str, ours: Floats, theirs: Floats) -> PairedDifference:
    known = np.isfinite(ours) & np.isfinite(theirs)
    changes, low, high = (theirs - ours)[known], math.nan, math.nan
    size = len(changes)
    if size >= _FEWEST_PAIRS:
        cosines = min(_MOST_COSINES, size - 1)
        low, high = estimate(changes, None, cosines).limits(student(0.95, cosines))
    means = (float(one.mean()) if size else math.nan for one in (ours[known], theirs[known], changes))
    shares = (float(one.mean()) if size else math.nan for one in (changes < 0, changes > 0))
    return PairedDifference(group, name, metric, size, *means, low, high, *shares)  # type: ignore[call-arg]  # 3 and 2


def write_paired(recorded: OutcomeTable, simulated: OutcomeTable, request_ids: Sequence[str], file: TextIO) -> None:
    """Write a line for each request, with the metrics of both runs and their difference."""
    writer = csv.writer(file, lineterminator="\n")
    sides = ("recorded", "simulated", "difference")
    heads = (f"{side}_{metric}_ms" for metric in METRICS for side in sides)
    status_of = ("recorded_status", "simulated_status", "arrival_seconds")
    writer.writerow(("index", "request_id", "adapter_id", "tenant_id", *status_of, *heads))
    ours, theirs = values_ms(recorded), _values_by_index(simulated, len(recorded))
    status = dict(zip(simulated.index.tolist(), simulated.status, strict=True))
    columns = [column.tolist() for name in METRICS for column in (ours[name], theirs[name], theirs[name] - ours[name])]
    texts = (request_ids, (one or "" for one in recorded.adapter_id), recorded.tenant_id, recorded.status)
    sent = recorded.sent_seconds.tolist()
    for index, (*words, at, values) in enumerate(zip(*texts, sent, zip(*columns, strict=True), strict=True)):
        writer.writerow((index, *words, status.get(index, ""), f"{at:.6f}", *map(_cell, values)))


def write_differences(differences: Iterable[PairedDifference], file: TextIO) -> None:
    """Write a line for each group and metric."""
    writer = csv.writer(file, lineterminator="\n")
    names = [one.name for one in fields(PairedDifference)]
    writer.writerow(names)
    for one in differences:
        values = (getattr(one, name) for name in names)
        writer.writerow(_cell(value) if isinstance(value, float) else value for value in values)


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"
