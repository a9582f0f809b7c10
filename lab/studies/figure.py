"""Draws a study's figure, and writes its output: NAME.png, NAME.svg, and NAME.csv with the drawn values, in a folder.

The look is that of all plots (`lorrery.view.plots`); this module defines the meaning of each style: a solid line or a
filled bar is ours, a hollow mark is a figure published by others. The caption under a figure names the source of such
figures and the limits of ours.
"""

import argparse
import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lorrery.service.errors import LorreryError
from lorrery.view import plots
from lorrery.view.plots import BLACK, BLUE, GREEN, GREY, PALE, SKY, VERMILLION, canvas, legend_above, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BEHIND_BARS", "BLACK", "BLUE", "DEFAULT_FOLDER", "GREEN", "GREY", "PALE", "SKY", "VERMILLION",
    "Bars", "bars", "canvas", "legend_above", "parser", "published", "save", "series", "write_table",
]  # fmt: skip
BEHIND_BARS = 0.9
"""`zorder` of the values beside bars, and of lines that do not cross them if drawn before."""
DEFAULT_FOLDER = Path("docs/figures")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for a study's command line: its module's docstring, and the output folder."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="folder for figure and table")
    return made


def published(
    axes: "Axes", x: Sequence[float], y: Sequence[float], look: plots.Series, label: str, size_points: float = 7
) -> None:
    """Draw figures published by others: the hollow marks of a series; NaN draws nothing."""
    axes.plot(
        x,
        y,
        linestyle="none",
        marker=look.marker,
        markersize=size_points,
        markerfacecolor="none",
        markeredgecolor=look.colour,
        markeredgewidth=1.5,
        zorder=4,
        label=label,
    )


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars, one for each place.

    Attributes:
        legend: text of the legend.
        colour: of all bars.
        values: lengths of the bars.
    """

    legend: str
    colour: str
    values: Sequence[float]


def bars(axes: "Axes", names: Sequence[str], groups: Sequence[Bars], form: str) -> None:
    """Draw groups of horizontal bars, the first name on top, each with its value next to it.

    Args:
        axes: axes to draw on.
        names: one for each place.
        groups: the bars of each place, the first on top.
        form: format of the values, for `format`.
    """
    places = np.arange(len(names))
    thickness = 0.8 / len(groups)
    for number, group in enumerate(groups):
        middle = places + (number - (len(groups) - 1) / 2) * thickness
        axes.barh(middle, group.values, thickness * 0.94, color=group.colour, label=group.legend)
        for place, value in zip(middle, group.values, strict=True):
            text = format(value, form)
            axes.annotate(
                text, (value, place), xytext=(5, 0), textcoords="offset points", va="center_baseline", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}, zorder=BEHIND_BARS,
            )  # fmt: skip
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.16)
    axes.xaxis.set_major_formatter("{x:,g}")


def save(draw: "Callable[[], Figure]", folder: Path, name: str, caption: str) -> None:
    """Draw a figure, and write it with its caption as NAME.png and NAME.svg.

    Raises:
        SystemExit: matplotlib is not installed, or a file cannot be written; the message says which and what to do.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with plots.drawing("the figure"):
            figure = draw()
            for suffix in (".png", ".svg"):
                print(f"figure  {plots.save(figure, folder / f'{name}{suffix}', caption)}")
    except LorreryError as error:
        raise SystemExit(f"error: {error}") from None


def write_table(folder: Path, name: str, rows: Iterable[Mapping[str, object]]) -> Path:
    """Write NAME.csv, one line per row, with the columns of the first row; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    lines = [{column: _cell(value) for column, value in row.items()} for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"table   {path}")
    return path


def _cell(value: object) -> object:
    """Round a number to six significant digits: enough for a reader, and the same on every machine; empty for NaN."""
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"
