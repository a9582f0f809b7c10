"""Plots of a sweep: throughput and latencies over the swept keys.

The first numeric key is the x axis, with lines; without a numeric key it is the first key, with bars. The next key
gives one line (or bar) per value, and each combination of further keys a separate figure. A mean over seeds
has a bar, its 95 % interval.

Lines that coincide stay visible: the first is the widest, each has its own marker, and p99 is dashed with hollow
markers; bars have hatches. A caption names what all points share. The look is that of all plots
(`lorrery.view.plots`).
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorrery.service.installed import has_extra
from lorrery.simulator.sweep.axes import Axis, Value
from lorrery.simulator.sweep.points import SEED
from lorrery.simulator.sweep.table import Row, short_names
from lorrery.view import plots
from lorrery.vocabulary.files import count_kinds
from lorrery.vocabulary.intervals import mean_and_margin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

_MOST_FIGURES = 24
_MOST_TICKS = 9
_MANY = 7
"""Lines of different colours; with more, none is wider than the others."""
_P99_ALPHA = 0.45
_WIDTHS = 1.3, 3.6
"""Of the last and of the first line, in points."""
_UNITS = {"rate": "requests/s", "concurrency": "clients", "duration": "s", "jitter": "s", "timeout": "s"}
"""Units of options; a setting has its unit in its name."""
_SUFFIXES = {
    "_seconds": "s", "_us": "microseconds", "_gb_per_second": "GB/s", "_tokens": "tokens", "_token_num": "tokens",
    "_len": "tokens", "block_size": "tokens", "_ratio": "share",
}  # fmt: skip
_LEGEND_CHARACTERS = 110
"""That fit in one row above the figure."""
_LOG_X, _LOG_Y = 16, 50
"""Ratio of the largest to the smallest value from which an axis is logarithmic, if that spaces x more evenly."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """One figure, optionally with a second one in the same panel."""

    title: str
    label: str
    main: str
    second: str | None = None
    of: str | None = None
    """Divide by this figure, and show percent."""
    scale: float = 1.0


_PANELS = (
    _Panel("Output throughput", "throughput (tokens/s)", "output_tokens_per_second"),
    _Panel("TTFT, from the intended send", "TTFT (ms)", "ttft_ms_p50", "ttft_ms_p99"),
    _Panel("TPOT", "TPOT (ms)", "tpot_ms_p50", "tpot_ms_p99"),
    _Panel("E2E, from the intended send", "E2E (ms)", "e2e_ms_p50", "e2e_ms_p99"),
)
_IF_ANY = (
    _Panel("Cost", "GPU hours", "gpu_hours"),
    _Panel("Within the service level", "in time (% of requests)", "good_ratio", scale=100.0),
    _Panel("Cached prompt tokens", "cached (% of prompt tokens)", "cached_tokens", of="input_tokens"),
    _Panel("Failed requests", "failed (% of requests)", "num_failed", of="num_requests"),
)


@dataclass(frozen=True, slots=True)
class _Series:
    """One line or group of bars: rows by their index on the x axis; several with swept seeds."""

    label: str
    look: plots.Series
    width: float
    rows: dict[int, list[Row]]


def draw(folder: Path, axes: Sequence[Axis], rows: Sequence[Row]) -> list[Path] | None:
    """Draw all figures, as PNG and SVG; return the files. None without matplotlib; empty if there is nothing to draw.

    Raises:
        LorreryError: a file cannot be written.
    """
    if not has_extra("plot"):
        return None
    names = dict(zip((axis.key for axis in axes), short_names(axes), strict=True))
    swept = [axis for axis in axes if len(axis.values) > 1]
    if len(swept) > 1:
        swept = [axis for axis in swept if axis.key != SEED]
    done = [row for row in rows if row.figures is not None]
    if not swept or len(done) < 2:
        return []
    x = next((axis for axis in swept if axis.is_numeric), swept[0])
    others = [axis for axis in swept if axis is not x]
    lines, facets = others[0] if others else None, others[1:]
    panels = [*_PANELS, *(panel for panel in _IF_ANY if any(row.figure(panel.main) for row in done))]
    written: list[Path] = []
    for chosen in itertools.islice(itertools.product(*(axis.values for axis in facets)), _MOST_FIGURES):
        fixed = {axis.key: value for axis, value in zip(facets, chosen, strict=True)}
        series = _series([row for row in done if fixed.items() <= row.point.values.items()], x, lines)
        if not series:
            continue
        suffix = "-".join(f"{names[key]}={value}" for key, value in fixed.items())
        path = folder / f"sweep{'-' if suffix else ''}{re.sub(r'[^A-Za-z0-9=._-]+', '_', suffix)}"
        with plots.drawing("the plot of a sweep"):
            figure = _draw_figure(panels, x, names[x.key], series, "" if lines is None else names[lines.key])
            caption = _caption(done[0], axes, fixed, names)
            written += [plots.save(figure, path.with_name(f"{path.name}.{kind}"), caption) for kind in ("png", "svg")]
    return written


def _draw_figure(
    panels: Sequence[_Panel], x: Axis, x_name: str, series: Sequence[_Series], lines_name: str
) -> "Figure":
    rows = math.ceil(len(panels) / 2)
    figure, places = plots.canvas(rows, 2, 2.9 * rows + 0.9)
    for panel, place in itertools.zip_longest(panels, places):
        if panel is None:
            place.set_axis_off()
        else:
            _draw_panel(place, panel, x, x_name, series)
    _draw_legend(figure, x, series, lines_name)
    return figure


def _series(rows: Sequence[Row], x: Axis, lines: Axis | None) -> list[_Series]:
    values: tuple[Value | None, ...] = (None,) if lines is None else lines.values
    found = []
    for index, value in enumerate(values):
        places: dict[int, list[Row]] = {}
        for row in rows:
            if lines is None or row.point.values[lines.key] == value:
                places.setdefault(x.values.index(row.point.values[x.key]), []).append(row)
        least, most = _WIDTHS
        is_alone = len(values) == 1 or len(values) > _MANY
        width = least if is_alone else most - (most - least) * index / (len(values) - 1)
        if places:
            found.append(_Series(str(value), plots.series(index), width, dict(sorted(places.items()))))
    return found


def _draw_panel(place: "Axes", panel: _Panel, x: Axis, x_name: str, series: Sequence[_Series]) -> None:
    from matplotlib.ticker import StrMethodFormatter

    place.set_title(panel.title)
    unit = _unit(x.key)
    place.set_xlabel(f"{x_name} ({unit})" if unit else x_name)
    place.set_ylabel(panel.label)
    if not x.is_numeric:
        place.grid(visible=False, axis="x")
    drawn: list[float] = []
    for number, one in enumerate(series):
        for name in (panel.main, panel.second):
            if name is None:
                continue
            marks = _marks(one, name, panel)
            drawn += [mean for _, mean, _, _ in marks]
            if x.is_numeric:
                _draw_line(place, x, one, marks, is_second=name == panel.second)
            else:
                _draw_bars(place, one, marks, number, len(series), is_second=name == panel.second)
    least = min((value for value in drawn if value > 0), default=0.0)
    if panel.second and least and max(drawn) / least > _LOG_Y:
        place.set_yscale("log")
        if not x.is_numeric:
            place.set_ylim(bottom=10 ** math.floor(math.log10(least)))
    else:
        place.set_ylim(bottom=0)
        if drawn:  # nearly equal values would lie on the upper edge
            place.set_ylim(top=max(place.get_ylim()[1], 1.05 * max(drawn) or 1.0))
    place.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    _set_x(place, x)


def _marks(series: _Series, name: str, panel: _Panel) -> list[tuple[int, float, float, float]]:
    """Return index on the x axis, mean, and the ends of its interval; with one seed the last three are equal."""
    found = []
    for index, rows in series.rows.items():
        values, margins = list[float](), list[float]()
        for row in rows:
            value, whole = row.figure(name), row.figure(panel.of) if panel.of is not None else 1.0
            if value is not None and whole:
                scale = (100 if panel.of is not None else panel.scale) / whole
                values.append(value * scale)
                margins.append(row.margins.get(name, 0.0) * scale)
        if values:
            mean, margin = mean_and_margin(values) if len(values) > 1 else (values[0], margins[0])
            found.append((index, mean, max(mean - margin, 0.0), mean + margin))
    return found


def _draw_line(
    place: "Axes", x: Axis, series: _Series, marks: Sequence[tuple[int, float, float, float]], *, is_second: bool
) -> None:
    if not marks:
        return
    index, mean, least, most = zip(*sorted(marks, key=lambda mark: x.values[mark[0]]), strict=True)
    at = [x.values[position] for position in index]
    stroke: dict[str, Any] = (
        {"linestyle": "--", "linewidth": 1.2, "markersize": 4, "markerfacecolor": "white", "alpha": _P99_ALPHA + 0.2}
        if is_second
        else {"linewidth": series.width, "markersize": series.width + 3}
    )
    look = series.look
    place.plot(at, mean, marker=look.marker, color=look.colour, **stroke)
    if least != most:
        place.vlines(at, least, most, color=look.colour, alpha=0.5, linewidth=1)


def _draw_bars(
    place: "Axes",
    series: _Series,
    marks: Sequence[tuple[int, float, float, float]],
    number: int,
    num_series: int,
    *,
    is_second: bool,
) -> None:
    width = 0.8 / num_series
    at = [index + (number - (num_series - 1) / 2) * width for index, _, _, _ in marks]
    fill: dict[str, Any] = {"alpha": _P99_ALPHA / 2, "zorder": 1} if is_second else {"zorder": 2}
    means = [mean for _, mean, _, _ in marks]
    place.bar(at, means, width * 0.92, color=series.look.colour, hatch=series.look.hatch, edgecolor="white", **fill)
    if any(least != most for _, _, least, most in marks):
        place.vlines(
            at, [mark[2] for mark in marks], [mark[3] for mark in marks], color="black", linewidth=1, zorder=3
        )  # fmt: skip


def _draw_legend(figure: "Figure", x: Axis, series: Sequence[_Series], title: str) -> None:
    """Name the lines (or bars), and show the styles of p50 and p99."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    if title:
        handles += [
            Line2D([], [], color=one.look.colour, marker=one.look.marker, linewidth=one.width, label=one.label)
            if x.is_numeric
            else Patch(facecolor=one.look.colour, hatch=one.look.hatch, edgecolor="white", label=one.label)
            for one in series
        ]
    if x.is_numeric:
        handles += [
            Line2D([], [], color="grey", marker="o", label="p50"),
            Line2D([], [], color="grey", marker="o", markerfacecolor="white", linestyle="--", label="p99"),
        ]
    else:
        handles += [Patch(color="grey", label="p50"), Patch(color="grey", alpha=_P99_ALPHA / 2, label="p99")]
    widest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), _LEGEND_CHARACTERS // (widest + 7)))
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, title=title or None, alignment="left"
    )  # fmt: skip


def _caption(row: Row, axes: Sequence[Axis], fixed: Mapping[str, Value], names: Mapping[str, str]) -> str:
    """Describe the cluster and the load of the figures; swept keys are left to axis, legend and first line."""
    assert row.point.run is not None
    settings, options, simulation = row.point.run.settings, row.point.run.options, row.point.run.simulation
    swept = {axis.key.replace("_", "-") for axis in axes}

    def unless(key: str, text: str) -> str:
        return "" if key.replace("_", "-") in swept else text

    gpu = f"{settings.worker.tensor_parallel} x {settings.worker.gpu}"
    gpu = unless("worker.gpu", unless("worker.tensor_parallel", f" of {gpu}"))
    num_workers = simulation.workers
    assert num_workers is not None  # set in every point
    in_all = sum(count for _, count in settings.kinds(num_workers))
    at_first = " at first" if settings.is_autoscaled else ""
    workers = unless("workers", (f"{in_all} worker" if in_all == 1 else f"{in_all} workers") + at_first)
    if settings.workers:
        counted = count_kinds(
            (kind.worker.gpu, kind.worker.tensor_parallel)
            for kind, count in settings.kinds(num_workers)
            for _ in range(count)
        )
        gpu = ": " + ", ".join(f"{count} x {name}" for name, count in counted)
    cluster = (
        unless("model", settings.model),
        (workers or "workers") + gpu,
        unless("scheduler.policy", settings.scheduler.policy),
    )
    trace = None if options.trace_file is None else options.trace_file.name
    drawn = trace is None
    seconds = options.schedule_seconds
    load = (
        unless("workload", f"{options.workload} arrivals" if drawn else f"trace {trace}"),
        unless("rate", f"{options.rate:g} requests/s") if drawn and options.concurrency is None else "",
        unless("concurrency", f"{options.concurrency} clients") if options.concurrency is not None else "",
        unless("duration", f"{seconds:g} s") if seconds is not None else "",
        unless("num-requests", f"{options.num_requests:,} requests") if options.num_requests is not None else "",
        unless("input-range", "prompts of {} to {} tokens".format(*options.prompt_lengths)) if drawn else "",
        unless("output-range", "answers of {} to {} tokens".format(*options.output_lengths)) if drawn else "",
        unless("adapters", f"adapters: {options.adapters}") if options.adapters else "",
        unless("num-adapters", f"{options.num_adapters} adapters") if options.num_adapters else "",
    )
    seeds = next((len(axis.values) for axis in axes if axis.key == SEED), len(row.points))
    shows_means = len(row.points) > 1 or (seeds > 1 and len(axes) > 1)
    lines = (
        ", ".join(f"{names[key]} {value}" for key, value in fixed.items()),
        "Simulated: " + ", ".join(part for part in cluster if part),
        ", ".join(part for part in load if part),
        f"means of {seeds} seeds, with bars for their 95 % intervals" if shows_means else "",
    )
    return "\n".join(line for line in lines if line)


def _unit(key: str) -> str:
    last = key.rpartition(".")[2]
    return _UNITS.get(last) or next((unit for suffix, unit in _SUFFIXES.items() if last.endswith(suffix)), "")


def _set_x(place: "Axes", x: Axis) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    if not x.is_numeric:
        place.set_xticks(range(len(x.values)), [str(value) for value in x.values])
        place.set_xlim(-0.5, len(x.values) - 0.5)
        if sum(len(str(value)) for value in x.values) > 45:
            place.tick_params(axis="x", labelrotation=25)
        return
    numbers = sorted(float(value) for value in x.values)
    gaps = [high - low for low, high in itertools.pairwise(numbers)]
    if numbers[0] > 0 and numbers[-1] / numbers[0] >= _LOG_X and max(gaps) > 4 * min(gaps):
        place.set_xscale("log")
    if len(numbers) <= _MOST_TICKS:
        place.set_xticks(numbers, [f"{number:g}" for number in numbers])
        place.xaxis.set_minor_locator(NullLocator())
        place.xaxis.set_minor_formatter(NullFormatter())
