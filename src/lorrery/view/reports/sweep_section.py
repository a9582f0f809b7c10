"""A sweep's part of the page: plots over what was swept, and the table of its points.

The first numeric key is the x axis (without one, the first key), the next one has a line for each value, and each
combination of further keys a row of charts. A mean over seeds has a bar, its 95 % interval.
"""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from lorrery.view.reports import chart
from lorrery.view.reports.sweep import DONE, NUM_SEEDS, SEED, Axis, Point, Sweep
from lorrery.view.reports.tables import Column, Table, cut
from lorrery.vocabulary.intervals import mean_and_margin

__all__ = ["SweepSection", "sweep_section"]

_MOST_ROWS, _MOST_FACETS, _MOST_LINES = 400, 8, 8
_UNITS = {"rate": "requests/s", "concurrency": "clients", "duration": "s"}
_RECORDED = ("azure", "mooncake", "trace")
"""Workloads without a rate."""
_MOST_TICKS = 9
_LOG_RATIO = 16


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    axis: str
    unit: str
    figure: str
    scale: float = 1.0
    of: str = ""
    """Divide by this figure, and show percent."""


_PANELS = (
    _Panel("Output throughput", "output tokens/s", "", "output_tokens_per_second"),
    _Panel("TTFT p50", "from the intended send", "s", "ttft_ms_p50", 1e-3),
    _Panel("TTFT p99", "from the intended send", "s", "ttft_ms_p99", 1e-3),
    _Panel("TPOT p50", "per output token", "s", "tpot_ms_p50", 1e-3),
    _Panel("TPOT p99", "per output token", "s", "tpot_ms_p99", 1e-3),
    _Panel("E2E p99", "from the intended send", "s", "e2e_ms_p99", 1e-3),
)
_IF_ANY = (
    _Panel("Cost", "GPU hours", "", "gpu_hours"),
    _Panel("Within the service level", "% of requests", "%", "good_ratio", 100.0),
    _Panel("Cached prompt tokens", "% of prompt tokens", "%", "cached_tokens", 100.0, "input_tokens"),
    _Panel("Failed requests", "% of requests", "%", "num_failed", 100.0, "num_requests"),
)
_SHOWN = (
    ("requests/s", "requests_per_second", 1.0, ""),
    ("output tokens/s", "output_tokens_per_second", 1.0, ""),
    ("TTFT p50", "ttft_ms_p50", 1.0, "ms"),
    ("TTFT p99", "ttft_ms_p99", 1.0, "ms"),
    ("TPOT p50", "tpot_ms_p50", 1.0, "ms"),
    ("TPOT p99", "tpot_ms_p99", 1.0, "ms"),
    ("E2E p99", "e2e_ms_p99", 1.0, "ms"),
    ("GPU hours", "gpu_hours", 1.0, ""),
    ("service level", "good_ratio", 100.0, "%"),
    ("workers", "replicas_mean", 1.0, "mean"),
)
_SHOWN_IF_ANY = (
    ("cached prompt tokens", "cached_tokens", 1.0, ""),
    ("failed", "num_failed", 1.0, ""),
)


@dataclass(frozen=True, slots=True)
class Facet:
    """A row of charts: its fixed values, its legend, its charts."""

    title: str
    legend: list[Markup]
    charts: list[Markup]


@dataclass(frozen=True, slots=True)
class SweepSection:
    """The template's view of a sweep."""

    name: str
    facts: list[tuple[str, str]]
    warnings: list[str]
    facets: list[Facet]
    table: Table
    notes: list[str]


def sweep_section(sweep: Sweep) -> SweepSection:
    """Make the charts and the table of a sweep."""
    notes: list[str] = []
    return SweepSection(
        sweep.name,
        _facts(sweep),
        [cut(one, 400) for one in sweep.warnings],
        _facets(sweep, notes),
        _table(sweep, notes),
        notes,
    )


def _groups(groups: object, worker: Mapping[str, Any]) -> str:
    """Describe the groups of workers, if the settings have any."""
    found = [_mapping(one) for one in groups] if isinstance(groups, list) else []
    return ", ".join(f"{one.get('count', 1)} x {one.get('gpu', worker.get('gpu'))}" for one in found)


def _facts(sweep: Sweep) -> list[tuple[str, str]]:
    swept = "; ".join(f"{axis.key} = {cut(', '.join(map(_text, axis.values)), 120)}" for axis in sweep.axes)
    done = sum(point.status == DONE for point in sweep.points)
    found = [("swept", swept), ("points", f"{done:,} of {len(sweep.points):,} ran")]
    keys = {axis.key for axis in sweep.axes}
    settings, options = (_mapping(sweep.context.get(name)) for name in ("settings", "options"))
    worker, scheduler = (_mapping(settings.get(name)) for name in ("worker", "scheduler"))
    simulation = _mapping(sweep.context.get("simulation"))
    groups = _groups(settings.get("workers"), worker)
    has_own_times = options.get("workload") in _RECORDED or options.get("concurrency") is not None
    is_scaled = _mapping(settings.get("autoscaler")).get("enabled") is True
    shown = (
        ("model", settings.get("model"), "model"),
        ("GPU", None if groups else worker.get("gpu"), "worker.gpu"),
        ("workers at first" if is_scaled else "workers", groups or simulation.get("workers"), "workers"),
        ("policy", scheduler.get("policy"), "scheduler.policy"),
        ("workload", options.get("workload"), "workload"),
        ("rate", None if has_own_times else options.get("rate"), "rate"),
        ("adapters", options.get("adapters"), "adapters"),
        ("version", sweep.context.get("lorrery_version"), ""),
    )
    found += [(name, cut(str(value), 80)) for name, value, key in shown if value is not None and key not in keys]
    if isinstance(given := sweep.context.get("command_line"), list) and given:
        found.append(("given to all points", cut(shlex.join(map(str, given)), 4_000)))
    return found


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _facets(sweep: Sweep, notes: list[str]) -> list[Facet]:
    swept = [axis for axis in sweep.axes if len(axis.values) > 1]
    if len(swept) > 1:
        swept = [axis for axis in swept if axis.key != SEED] or swept
    done = [point for point in sweep.points if point.status == DONE]
    if not swept or len(done) < 2:
        notes.append("fewer than two points ran, so there is nothing to draw")
        return []
    x = next((axis for axis in swept if axis.is_numeric), swept[0])
    others = [axis for axis in swept if axis is not x]
    line_axis, fixed_axes = (others[0], others[1:]) if others else (None, [])
    combinations = list(itertools.product(*(axis.values for axis in fixed_axes)))
    if len(combinations) > _MOST_FACETS:
        kept = f"the first {_MOST_FACETS} of {len(combinations):,} combinations"
        notes.append(f"{kept} of {', '.join(axis.key for axis in fixed_axes)} are drawn; the table has all")
    is_swept = any(axis.key == SEED and len(axis.values) > 1 for axis in sweep.axes) and x.key != SEED
    if is_swept or any(point.margins for point in done):
        notes.append("marks are means over the seeds, with a bar for the 95 % interval in which such a mean lies")
    found = []
    for chosen in combinations[:_MOST_FACETS]:
        fixed = dict(zip((axis.key for axis in fixed_axes), chosen, strict=True))
        points = [point for point in done if all(point.values[key] == value for key, value in fixed.items())]
        if points:
            title = ", ".join(f"{key} = {_text(value)}" for key, value in fixed.items())
            found.append(_facet(title, points, x, line_axis, notes))
    return found


def _facet(title: str, points: Sequence[Point], x: Axis, line_axis: Axis | None, notes: list[str]) -> Facet:
    values: tuple[float | str, ...] = line_axis.values if line_axis is not None else ("",)
    if len(values) > _MOST_LINES:
        note = f"the first {_MOST_LINES} of {len(values):,} values of {line_axis.key if line_axis else ''} are drawn"
        if note not in notes:
            notes.append(note)
        values = values[:_MOST_LINES]
    panels = [panel for panel in _PANELS if any(math.isfinite(point.figure(panel.figure)) for point in points)]
    panels += [panel for panel in _IF_ANY if any(point.figure(panel.figure) > 0 for point in points)]
    labels = () if x.is_numeric else tuple(map(_text, x.values))
    numeric = [float(value) for value in x.values] if x.is_numeric else []
    log = bool(numeric) and min(numeric) > 0 and max(numeric) / min(numeric) >= _LOG_RATIO
    across = chart.Axis(f"{x.key}{f', {_UNITS[x.key]}' if x.key in _UNITS else ''}", log=log, marked=_ticks(numeric))
    charts = []
    for panel in panels:
        drawn = []
        for style, value in enumerate(values):
            own = [point for point in points if line_axis is None or point.values[line_axis.key] == value]
            drawn.append(_line(panel, own, x, _text(value) or panel.title, style))
        finite = [one for line in drawn for one in line.y.tolist() if math.isfinite(one) and one > 0]
        steep = panel.unit == "s" and bool(finite) and max(finite) / min(finite) > 50
        up = chart.Axis(panel.axis, panel.unit, log=steep, low=None if steep else 0.0)
        charts.append(chart.lines(panel.title, across, up, drawn, labels=labels))
    legend = []
    if line_axis is not None:
        legend = [chart.swatch(f"{line_axis.short} = {_text(value)}", style) for style, value in enumerate(values)]
    return Facet(title, legend, charts)


def _ticks(values: Sequence[float]) -> tuple[float, ...]:
    """Use the swept values as ticks if there is room for all."""
    return tuple(values) if len(values) <= _MOST_TICKS else ()


def _line(panel: _Panel, points: Sequence[Point], x: Axis, name: str, style: int) -> chart.Line:
    places, middles, lows, highs = [], [], [], []
    for number, value in enumerate(x.values):
        here = [_value(panel, point) for point in points if point.values[x.key] == value]
        mean, margin = mean_and_margin(here)
        if len(here) == 1:
            margin = _margin(panel, next(point for point in points if point.values[x.key] == value))
        if math.isfinite(mean):
            places.append(float(value) if x.is_numeric else float(number))
            middles.append(mean)
            lows.append(max(mean - margin, 0.0) if math.isfinite(margin) else mean)
            highs.append(mean + margin if math.isfinite(margin) else mean)
    spread = any(high > low for low, high in zip(lows, highs, strict=True))
    bars = (np.array(lows), np.array(highs)) if spread else (np.empty(0), np.empty(0))
    return chart.Line(name, np.array(places), np.array(middles), style, marks=True, low=bars[0], high=bars[1])


def _value(panel: _Panel, point: Point) -> float:
    value = point.figure(panel.figure) * panel.scale
    if not panel.of:
        return value
    whole = point.figure(panel.of)
    return value / whole if whole else math.nan


def _margin(panel: _Panel, point: Point) -> float:
    margin = point.margins.get(panel.figure, 0.0) * panel.scale
    whole = point.figure(panel.of) if panel.of else 1.0
    return margin / whole if whole else 0.0


def _table(sweep: Sweep, notes: list[str]) -> Table:
    shown = [one for one in _SHOWN if any(math.isfinite(point.figure(one[1])) for point in sweep.points)]
    shown += [one for one in _SHOWN_IF_ANY if any(point.figure(one[1]) > 0 for point in sweep.points)]
    all_ran = all(point.status == DONE for point in sweep.points)
    columns = [Column(axis.key, text=not axis.is_numeric) for axis in sweep.axes]
    columns += [] if all_ran else [Column("status", text=True)]
    columns += [Column(name, unit=unit) for name, _, _, unit in shown]
    rows = []
    for point in sweep.points[:_MOST_ROWS]:
        cells = [cut(_text(point.values[axis.key])) for axis in sweep.axes]
        if not all_ran:
            cells.append(cut(f"{point.status}: {point.error}" if point.error else point.status, 160))
        cells += [_with_margin(point, figure, scale) for _, figure, scale, _ in shown]
        rows.append(cells)
    if len(sweep.points) > _MOST_ROWS:
        notes.append(f"the table has the first {_MOST_ROWS} of {len(sweep.points):,} points; sweep.csv has all")
    if any(point.margins for point in sweep.points):
        seeds = dict.fromkeys(_text(point.figure(NUM_SEEDS)) for point in sweep.points)
        notes.append(f"the table has means over {' or '.join(seeds)} seeds ± half of their 95 % interval")
    return Table("Points", columns, rows)


def _with_margin(point: Point, figure: str, scale: float) -> str:
    shown = chart.number(point.figure(figure) * scale)
    margin = point.margins.get(figure)
    return shown if margin is None else f"{shown} ± {chart.number(margin * scale)}"


def _text(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:g}"
