"""The charts of the page with one line, or bar, per run, and those of scaling.

The charts of scaling show the number of workers over time, and the metrics that the autoscaler's rule read. Beside the
charts of waiting, running and arriving requests they show whether a rule was late, restless, or kept too many workers.
"""

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from lorrery.view.reports import chart, figures
from lorrery.view.reports.chart import Axis, Line, seconds
from lorrery.view.reports.read import Run
from lorrery.view.reports.requests import Requests
from lorrery.view.reports.tables import cut
from lorrery.view.reports.timeline import Bins, StepBins, read_steps, timeline
from lorrery.vocabulary.files import SCALING_FILE

__all__ = ["PhaseBlock", "latency_charts", "length_charts", "phase_blocks", "scaling_charts", "timeline_charts"]

Floats = npt.NDArray[np.float64]

_PERCENTILE = re.compile(r"_p\d+$")
"""How the names of metrics end that are percentiles; all others are per worker."""

_FROM_INTENDED = "from the intended send"
_NUM_BINS = 240
"""For a rule's metrics: each bin shows the mean of its observations."""
_METRIC = "metric:"
_ACROSS = Axis("seconds of the run", low=0.0)
_PHASE_STYLES = {
    "queue": 1,
    "adapter load": 4,
    "prefill": 0,
    "prefill and adapter load": 0,
    "until the first token": 1,
    "decode": 2,
    "client and network": 7,
}


def latency_charts(runs: Sequence[Run]) -> list[Markup]:
    """Draw the cumulative distributions."""
    shown: tuple[tuple[str, str, Callable[[Requests], Floats]], ...] = (
        ("Time to first token", "TTFT, " + _FROM_INTENDED, lambda one: one.ttft),
        ("Time per output token", "TPOT, of a request", lambda one: one.tpot),
        ("End to end", "E2E, " + _FROM_INTENDED, lambda one: one.e2e),
    )
    found = []
    for title, label, values_of in shown:
        drawn = []
        for style, run in enumerate(runs):
            values, shares = figures.cumulative(values_of(run.requests))
            drawn.append(Line(run.name, values, shares * 100, style))
        # A logarithmic axis has no place for zero.
        least = min((float(line.x[line.x > 0].min(initial=math.inf)) for line in drawn), default=math.inf)
        low = least if math.isfinite(least) else None
        found.append(
            chart.lines(title, Axis(label, "s", log=True, low=low), Axis("% of requests", "%", low=0, high=100), drawn)
        )
    return found


def length_charts(runs: Sequence[Run]) -> list[Markup]:
    """Draw latency over prompt length."""
    buckets = [figures.by_length(run.requests) for run in runs]
    found = []
    across = Axis("prompt tokens", log=True)
    for title, which, level in (
        ("TTFT p50 by prompt length", "ttft", 0),
        ("TTFT p99 by prompt length", "ttft", 2),
        ("E2E p50 by prompt length", "e2e", 0),
    ):
        drawn = []
        for style, (run, own) in enumerate(zip(runs, buckets, strict=True)):
            kept = [one for one in own if level < 2 or one.count >= 100]
            x = np.array([math.sqrt(one.low * one.high) for one in kept])
            y = np.array([getattr(one, which)[level] for one in kept])
            drawn.append(Line(run.name, x, y, style, marks=True))
        values = [one for line in drawn for one in line.y.tolist() if one > 0]
        steep = bool(values) and max(values) / min(values) > 30
        note = "of 100 requests or more" if level == 2 else ""
        up = Axis(_FROM_INTENDED, "s", log=steep, low=None if steep else 0.0)
        found.append(chart.lines(title, across, up, drawn, note=note))
    return found


@dataclass(frozen=True, slots=True)
class PhaseBlock:
    """Bars of one kind of requests, one per run."""

    title: str
    groups: list[tuple[str, list[Markup]]]
    legend: list[Markup]


def phase_blocks(runs: Sequence[Run]) -> list[PhaseBlock]:
    """Draw how the time to the first and to the last token was spent."""
    found = []
    for title, first in (("to the first token", True), ("from send to last token", False)):
        groups: dict[str, list[Markup]] = {}
        names: dict[str, None] = {}
        for run in runs:
            for phase in figures.phases(run.requests, to_first_token=first):
                parts = []
                for name, value in phase.seconds:
                    names[name] = None
                    share = value / phase.total if phase.total > 0 else 0.0
                    parts.append((name, share, _PHASE_STYLES[name], seconds(value)))
                label = cut(run.name, 40) if len(runs) > 1 else phase.label
                groups.setdefault(phase.label, []).append(chart.stack(label, seconds(phase.total), parts))
        ordered = [name for name in _PHASE_STYLES if name in names]
        legend = [chart.swatch(name, _PHASE_STYLES[name], filled=True) for name in ordered]
        if groups:
            found.append(PhaseBlock(title, list(groups.items()), legend))
    return found


def timeline_charts(runs: Sequence[Run], warnings: Mapping[str, list[str]]) -> list[Markup]:
    """Draw the development of the run over time.

    Args:
        runs: in the order of their styles.
        warnings: by run, receive remarks on its steps.
    """
    bins = {run.name: timeline(run.requests) for run in runs}
    steps = {
        run.name: read
        for run in runs
        if run.steps is not None and (read := read_steps(run.steps, bins[run.name], warnings[run.name])) is not None
    }
    across = Axis("seconds of the run", low=0.0)

    def over_time(title: str, label: str, values: Callable[[Bins], Floats], unit: str = "", note: str = "") -> Markup:
        drawn = [Line(run.name, bins[run.name].at, values(bins[run.name]), style) for style, run in enumerate(runs)]
        return chart.lines(title, across, Axis(label, unit, low=0.0), drawn, note=note)

    told = any(run.requests.has("queue_seconds") for run in runs)
    running = ("Running", "requests, admitted") if told else ("Open", "requests, waiting or running")
    found = [over_time("Waiting", "requests", lambda one: one.waiting)] if told else []
    found.append(over_time(*running, lambda one: one.running))
    found.append(over_time("Output", "tokens/s", lambda one: one.output_tokens))
    found.append(over_time("Arrivals", "requests/s", lambda one: one.arrivals))
    for title, which in (("TTFT p50 over time", "ttft50"), ("TTFT p99 over time", "ttft99")):
        drawn = []
        for style, run in enumerate(runs):
            own = bins[run.name]
            drawn.append(Line(run.name, own.ttft_at, getattr(own, which), style))
        values = [one for line in drawn for one in line.y.tolist() if one > 0]
        steep = bool(values) and max(values) / min(values) > 100
        up = Axis("of the requests sent then", "s", log=steep, low=None if steep else 0.0)
        found.append(chart.lines(title, across, up, drawn))
    if any(run.requests.failed.any() for run in runs):
        found.append(over_time("Failures", "requests/s", lambda one: one.failed))
    return [*found, *_step_charts(runs, steps, across)]


def _step_charts(runs: Sequence[Run], steps: Mapping[str, StepBins], across: Axis) -> list[Markup]:
    found = []
    shown: tuple[tuple[str, str, str, str, float], ...] = (
        ("Sequences in steps", "of all workers", "", "batch", 1.0),
        ("KV cache", "tokens, of all workers", "", "kv_tokens", 1.0),
        ("Busy workers", "% of the time", "%", "busy", 100.0),
    )
    for title, label, unit, name, scale in shown:
        drawn = [
            Line(run.name, steps[run.name].at, getattr(steps[run.name], name) * scale, style)
            for style, run in enumerate(runs)
            if run.name in steps
        ]
        if any(np.isfinite(line.y).any() for line in drawn):
            read = min(one.share_read for one in steps.values())
            note = "from steps.csv" if read == 1 else f"from {read:.0%} of steps.csv, in pieces"
            high = 100.0 if unit == "%" else None
            found.append(chart.lines(title, across, Axis(label, unit, low=0.0, high=high), drawn, note=note))
    return found


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
