"""The charts of scaling: number of workers over time, and the metrics that the autoscaler's rule read.

Beside the charts of waiting, running and arriving requests they show whether a rule was late, restless, or kept too
many workers.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from lorrery.view.reports import chart
from lorrery.view.reports.chart import Axis, Line
from lorrery.view.reports.read import Run
from lorrery.vocabulary.run_files import SCALING_FILE

__all__ = ["scaling_charts"]

Floats = npt.NDArray[np.float64]

_NUM_BINS = 240
"""For a rule's metrics: each bin shows the mean of its observations."""
_METRIC = "metric:"
_PERCENTILE = re.compile(r"_p\d+$")
"""How the names of metrics end that are percentiles; all others are per worker."""
_ACROSS = Axis("seconds of the run", low=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Looks:
    """Observations of a group of workers, in order of time; all of shape (looks,).

    Attributes:
        seen: by metric, NaN if it had no value.
    """

    group: str
    at: Floats
    ready: Floats
    desired: Floats
    seen: Mapping[str, Floats]


def scaling_charts(runs: Sequence[Run], warnings: Mapping[str, list[str]]) -> list[Markup]:
    """Draw workers over time; nothing if no run has a file of them.

    Args:
        runs: in the order of their styles.
        warnings: by run, receive errors of reading.
    """
    found: dict[str, list[_Looks]] = {}
    for run in runs:
        path = run.folder / SCALING_FILE
        if path.exists():
            try:
                found[run.name] = _read(path)
            except (OSError, ValueError, KeyError) as error:
                warnings[run.name].append(f"{SCALING_FILE} cannot be read, so its charts are missing: {error!r}")
    if len(runs) == 1:
        return [one for groups in found.values() for looks in groups for one in _of_group(looks)]
    return _of_runs(runs, found) if found else []


def _of_group(looks: _Looks) -> list[Markup]:
    """Draw a group of one run's workers: serving and requested ones, and the metrics of its rule."""
    drawn = [
        Line("asked for", *_steps(looks.at, looks.desired), 1),
        Line("serve", *_steps(looks.at, looks.ready), 0),
    ]
    of_group = f", {looks.group}" if looks.group else ""
    note = "dashed: asked for"
    found = [chart.lines(f"Worker processes{of_group}", _ACROSS, Axis("processes", low=0.0), drawn, note=note)]
    for metric, values in looks.seen.items():
        seen = Line(metric, *_binned(looks.at, values))
        title = f"What the rule saw{of_group}"
        found.append(chart.lines(title, _ACROSS, Axis(metric, low=0.0), [seen], note=_note(metric)))
    return found


def _of_runs(runs: Sequence[Run], found: Mapping[str, Sequence[_Looks]]) -> list[Markup]:
    """Draw for each run the serving workers of all groups, and the metrics of its first group's rule."""
    drawn = []
    for style, run in enumerate(runs):
        groups = found.get(run.name, ())
        at = np.unique(np.concatenate([one.at for one in groups] or [np.empty(0)]))
        total = np.zeros(len(at))
        for one in groups:
            total += one.ready[np.maximum(np.searchsorted(one.at, at, side="right") - 1, 0)]
        drawn.append(Line(run.name, *_steps(at, total), style))
    charts = [chart.lines("Worker processes", _ACROSS, Axis("that serve", low=0.0), drawn)]
    firsts = {name: groups[0] for name, groups in found.items() if groups}
    for metric in dict.fromkeys(name for one in firsts.values() for name in one.seen):
        seen = [
            Line(run.name, *_binned(firsts[run.name].at, firsts[run.name].seen[metric]), style)
            for style, run in enumerate(runs)
            if run.name in firsts and metric in firsts[run.name].seen
        ]
        charts.append(chart.lines("What the rule saw", _ACROSS, Axis(metric, low=0.0), seen, note=_note(metric)))
    return charts


def _note(metric: str) -> str:
    return "of the cluster" if _PERCENTILE.search(metric) else "of each that serves"


def _read(path: Path) -> list[_Looks]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    groups = dict.fromkeys(row.get("group") or "" for row in rows)
    return [_looks(group, [row for row in rows if (row.get("group") or "") == group]) for group in groups]


def _looks(group: str, rows: Sequence[Mapping[str, str]]) -> _Looks:
    def column(name: str) -> Floats:
        return np.array([float(row[name] or "nan") for row in rows])

    metrics = [name.removeprefix(_METRIC) for name in rows[0] if name.startswith(_METRIC)]
    seen = {name: column(_METRIC + name) for name in metrics}
    its = {name: values for name, values in seen.items() if np.isfinite(values).any()}
    return _Looks(group, column("seconds"), column("ready"), column("desired"), its)


def _steps(at: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the corners of a step function."""
    if not len(at):
        return at, values
    changes = np.flatnonzero(np.diff(values)) + 1
    x = np.concatenate(([at[0]], np.repeat(at[changes], 2), [at[-1]]))
    y = np.concatenate(([values[0]], np.column_stack((values[changes - 1], values[changes])).ravel(), [values[-1]]))
    return x, y


def _binned(at: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the means over bins of equal width that have observations."""
    known = np.isfinite(values)
    at, values = at[known], values[known]
    if len(at) <= _NUM_BINS:
        return at, values
    bins = np.minimum(((at - at[0]) * (_NUM_BINS / (at[-1] - at[0]))).astype(np.int64), _NUM_BINS - 1)
    counts = np.bincount(bins, minlength=_NUM_BINS)
    there = counts > 0
    mean_at, mean = (np.bincount(bins, one, _NUM_BINS)[there] / counts[there] for one in (at, values))
    return mean_at, mean
