"""The plots of a sweep: throughput and latencies over what was swept.

The first key with numbers is the x axis, of lines; where no key has numbers the first is, of bars. The next key is one
line (or bar) for each of its values, and each combination of further keys a figure of its own. Points that differ in
`seed` alone are one mark, their mean, with a bar from the least to the most.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorrery.chassis.errors import LorreryError
from lorrery.sweeps.axes import Axis, Value
from lorrery.sweeps.table import Row, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

SEED = "seed"
_MOST_FIGURES = 24
_MOST_TICKS = 9
# Okabe and Ito's colours, which colour-blind readers can tell apart; more values than these get shades in their order.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_P99_ALPHA = 0.45
_LOG_X, _LOG_Y = 16, 50
"""Ratio of the largest to the smallest from which an axis is logarithmic, if that spaces x more evenly."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """One figure, and maybe a second one that is drawn with it."""

    title: str
    main: str
    second: str | None = None
    of: str | None = None
    """Divide by this figure, and show per cent."""


_PANELS = (
    _Panel("output tokens/s", "output_tokens_per_second"),
    _Panel("TTFT in ms", "ttft_ms_p50", "ttft_ms_p99"),
    _Panel("TPOT in ms", "tpot_ms_p50", "tpot_ms_p99"),
    _Panel("E2E in ms", "e2e_ms_p50", "e2e_ms_p99"),
)
_IF_ANY = (
    _Panel("cached share of prompt tokens, %", "cached_tokens", of="input_tokens"),
    _Panel("failed requests, %", "num_failed", of="num_requests"),
)


@dataclass(frozen=True, slots=True)
class _Series:
    """One line or group of bars: rows by their index on the x axis; several where seeds were swept."""

    label: str
    colour: Any
    rows: dict[int, list[Row]]


def draw(folder: Path, axes: Sequence[Axis], rows: Sequence[Row]) -> list[Path] | None:
    """Draw what has figures; give the files. None if matplotlib is not installed; empty where there is nothing to see.

    Raises:
        LorreryError: a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
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
        figure = Figure(figsize=(10, 3.3 * math.ceil(len(panels) / 2)), layout="constrained")
        grid = figure.subplots(math.ceil(len(panels) / 2), 2, squeeze=False).flatten()
        for panel, place in itertools.zip_longest(panels, grid):
            if panel is None:
                place.set_axis_off()
            else:
                _draw_panel(place, panel, x, names[x.key], series)
        title = ", ".join(f"{names[key]} {value}" for key, value in fixed.items())
        figure.suptitle(title, fontsize=11)
        if lines is not None:
            handles, labels = grid[0].get_legend_handles_labels()
            figure.legend(
                handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False,
                fontsize=9, title=names[lines.key], title_fontsize=9,
            )  # fmt: skip
        suffix = "-".join(f"{names[key]}={value}" for key, value in fixed.items())
        path = folder / f"sweep{'-' if suffix else ''}{re.sub(r'[^A-Za-z0-9=._-]+', '_', suffix)}.png"
        try:
            figure.savefig(path, dpi=120)
        except OSError as error:
            raise LorreryError(f"{path}: {error.strerror}") from None
        written.append(path)
    return written


def _series(rows: Sequence[Row], x: Axis, lines: Axis | None) -> list[_Series]:
    from matplotlib import colormaps

    values: tuple[Value | None, ...] = (None,) if lines is None else lines.values
    found = []
    for index, value in enumerate(values):
        places: dict[int, list[Row]] = {}
        for row in rows:
            if lines is None or row.point.values[lines.key] == value:
                places.setdefault(x.values.index(row.point.values[x.key]), []).append(row)
        many = len(values) > len(_COLOURS)
        colour = colormaps["viridis"](index / len(values)) if many else _COLOURS[index]
        if places:
            found.append(_Series(str(value), colour, dict(sorted(places.items()))))
    return found


def _draw_panel(place: "Axes", panel: _Panel, x: Axis, x_name: str, series: Sequence[_Series]) -> None:
    from matplotlib.ticker import StrMethodFormatter

    quantiles = ": p50, p99 " + ("dashed" if x.is_numeric else "pale") if panel.second else ""
    place.set_title(panel.title + quantiles, fontsize=10)
    place.set_xlabel(x_name, fontsize=9)
    place.tick_params(labelsize=8)
    place.grid(visible=True, axis="both" if x.is_numeric else "y", alpha=0.25)
    place.spines[["top", "right"]].set_visible(False)
    drawn: list[float] = []
    for number, one in enumerate(series):
        for name in (panel.main, panel.second):
            if name is None:
                continue
            marks = _marks(one, name, panel.of)
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
    place.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    _set_x(place, x)


def _marks(series: _Series, name: str, of: str | None) -> list[tuple[int, float, float, float]]:
    """Give index on the x axis, mean, least and most of a figure; of one seed these are the same."""
    found = []
    for index, rows in series.rows.items():
        values = []
        for row in rows:
            value, whole = row.figure(name), row.figure(of) if of is not None else 1.0
            if value is not None and whole:
                values.append(value / whole * (100 if of is not None else 1))
        if values:
            found.append((index, sum(values) / len(values), min(values), max(values)))
    return found


def _draw_line(
    place: "Axes", x: Axis, series: _Series, marks: Sequence[tuple[int, float, float, float]], *, is_second: bool
) -> None:
    if not marks:
        return
    index, mean, least, most = zip(*sorted(marks, key=lambda mark: x.values[mark[0]]), strict=True)
    at = [x.values[position] for position in index]
    style: dict[str, Any] = {"linestyle": "--", "alpha": _P99_ALPHA} if is_second else {"label": series.label}
    place.plot(at, mean, marker="o", markersize=2.5 if is_second else 4, linewidth=1.5, color=series.colour, **style)
    if least != most:
        place.vlines(at, least, most, color=series.colour, alpha=0.5, linewidth=1)


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
    style: dict[str, Any] = (
        {"alpha": _P99_ALPHA / 2, "zorder": 1} if is_second else {"label": series.label, "zorder": 2}
    )
    place.bar(at, [mean for _, mean, _, _ in marks], width * 0.92, color=series.colour, **style)
    if any(least != most for _, _, least, most in marks):
        place.vlines(
            at, [mark[2] for mark in marks], [mark[3] for mark in marks], color="black", linewidth=1, zorder=3
        )  # fmt: skip


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
