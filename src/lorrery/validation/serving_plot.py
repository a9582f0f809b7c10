"""The figure of `lorrery validate serving`: predicted against measured TPOT and TTFT, one panel per group.

Each panel has a mark per row, one colour and marker per figure, and lines at equality and 20 % off.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lorrery.service.errors import SettingsError
from lorrery.validation.figures import Errors
from lorrery.validation.serving import ServingComparison, grouped
from lorrery.validation.serving_rows import DOUBTFUL, OK
from lorrery.view import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPTION = "--plot"
_COLUMNS = 3
_OFF = 1.2
_TITLE_CHARACTERS = 34
_WIDE = 500.0
"""Range from which ticks are at powers of ten only."""

Points = dict[str, list[tuple[float, float]]]


def draw(path: Path, comparison: ServingComparison, group_by: list[str]) -> None:
    """Write the figure in the format given by the file's name.

    Raises:
        LorreryError: matplotlib is not installed, or the file cannot be written.
    """
    found = comparison.predictions
    panels = []
    rows = comparison.file.rows
    shown = (i for i, one in enumerate(found) if not one.why and not rows[i].quality.startswith(DOUBTFUL))
    for members in grouped(comparison.file, shown, group_by):
        errors = members.errors(found)
        points: Points = {"TPOT": [], "TTFT": []}
        for row, one in ((rows[index], found[index]) for index in members.indices):
            assert one.tpot_ms is not None
            assert one.ttft_ms is not None
            points["TPOT"].append((row.measured["tpot_ms"], one.tpot_ms))
            if row.ttft_counts:
                points["TTFT"].append((row.measured["ttft_ms"], one.ttft_ms))
        names = [*members.key.values()] if errors.quality == OK else [*members.key.values(), f"({errors.quality})"]
        named = textwrap.shorten(" ".join(names[1:]), _TITLE_CHARACTERS, placeholder="...")
        title = f"{' '.join(names[:1])}\n{named}\n{_said('TPOT', errors.tpot)}, {_said('TTFT', errors.ttft)}"
        panels.append((title, points))
    if not panels:
        raise SettingsError(f"{OPTION} {path}: there is no row to draw; each has a quality that is in doubt")
    draw_panels(path, panels, " (ms)", _caption(comparison))


def draw_panels(path: Path, panels: Sequence[tuple[str, Points]], unit: str, caption: str) -> None:
    """Write a figure of panels, each with the marks of the same figures.

    Args:
        path: the file; its name says the format.
        panels: title and marks of each.
        unit: of both axes.
        caption: below.

    Raises:
        LorreryError: matplotlib is not installed, or the file cannot be written.
    """
    lines, columns = -(-len(panels) // _COLUMNS), min(len(panels), _COLUMNS)
    with plots.drawing(OPTION):
        figure, axes = plots.canvas(lines, columns, 0.9 + 2.9 * lines)
        for panel, (title, points) in zip(axes, panels, strict=False):
            _draw_panel(panel, title, points)
        for spare in axes[len(panels) :]:
            spare.remove()
        for left in axes[: len(panels) : columns]:
            left.set_ylabel(f"predicted{unit}")
        for low in axes[max(len(panels) - columns, 0) : len(panels)]:
            low.set_xlabel(f"measured{unit}")
        plots.legend_above(figure, axes[0], columns=len(panels[0][1]))
        plots.save(figure, path, caption)


def _said(name: str, errors: Errors) -> str:
    return f"{name} {errors.mape:.1f} %" if errors.mape is not None else f"no {name}"


def _draw_panel(axes: "Axes", title: str, by_figure: Points) -> None:
    points = np.array([pair for pairs in by_figure.values() for pair in pairs])
    wider = max(1.4, (10 / (points.max() / points.min())) ** 0.5)  # a decade at least
    ends = np.array([points.min() / wider, points.max() * wider])
    axes.plot(ends, ends, color=plots.BLACK, linewidth=0.9)
    for factor in (_OFF, 1 / _OFF):
        axes.plot(ends, ends * factor, color=plots.GREY, linewidth=0.7, linestyle="--")
    for index, (name, pairs) in enumerate(by_figure.items()):
        look, shown = plots.series(index), np.array(pairs).reshape(-1, 2)
        axes.plot(
            shown[:, 0], shown[:, 1], linestyle="", marker=look.marker, markersize=3, markeredgewidth=0, alpha=0.65,
            color=look.colour, label=name,
        )  # fmt: skip
    axes.set_title(title, fontsize=8)
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    between = (1.0, 3.0) if ends[1] / ends[0] < _WIDE else (1.0,)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=between))
        axis.set_major_formatter(
            FuncFormatter(lambda value, _place: f"{value:,.0f}" if value < 1e4 else f"{value / 1e3:g}k")
        )
        axis.set_minor_formatter(NullFormatter())


def _caption(comparison: ServingComparison) -> str:
    missing = sum(one.num_rows for one in comparison.not_predicted)
    left_out = f" {missing:,} runs that cannot be simulated are left out." if missing else ""
    return (
        "Each run has two marks: its mean time per output token, and to its first token where that says something."
        " Figures are mean absolute errors. Solid: equal; dashed: 20 % off. Doubtful runs are not shown."
        f"{left_out}"
    )
