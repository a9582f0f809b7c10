"""How every study looks and what it leaves behind: NAME.png, and NAME.csv with what is drawn, in one folder.

One palette (Okabe and Ito's, which colour-blind readers can tell apart), one meaning for each style: a full line or a
filled bar is ours, a hollow mark is somebody else's published figure. The caption under a figure says where foreign
figures come from and what not to read into ours.
"""

import argparse
import csv
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
BLACK, GREY, PALE = "#222222", "#767676", "#c9ced3"
DEFAULT_FOLDER = Path("docs/figures")
WIDTH_INCHES, _DPI = 10.0, 120
_CAPTION_CHARACTERS = 165
"""Of a caption's line: as many as fill the width."""

mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e4e7ea",
        "grid.linewidth": 0.7,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Begin a study's command line: its module's text, and where to write."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="folder for figure and table")
    return made


def canvas(rows: int, columns: int, height_inches: float) -> tuple[Figure, list[Axes]]:
    """Make a figure; return it with its axes, row by row."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)  # type: ignore[union-attr,call-arg]  # the constrained one
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(np.ravel(axes))


def published(
    axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, label: str, size_points: float = 6.5
) -> None:
    """Draw somebody else's figures: hollow marks; NaN draws nothing."""
    axes.plot(
        x,
        y,
        linestyle="none",
        marker="o",
        markersize=size_points,
        markerfacecolor="none",
        markeredgecolor=colour,
        markeredgewidth=1.5,
        zorder=4,
        label=label,
    )


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars, one for each place.

    Attributes:
        legend: what they are.
        colour: of all of them.
        values: their lengths.
        marks: figures that they are to be compared with, drawn as strokes across; NaN where there is none.
    """

    legend: str
    colour: str
    values: Sequence[float]
    marks: Sequence[float] = ()


def bars(axes: Axes, names: Sequence[str], groups: Sequence[Bars], form: str, marks_legend: str = "") -> None:
    """Draw groups of horizontal bars, the first name on top, each with its value beside it.

    Args:
        axes: where.
        names: one for each place.
        groups: the bars of each place, the first on top.
        form: of the values, as `format` takes it.
        marks_legend: what the marks are.
    """
    places = np.arange(len(names))
    thickness = 0.8 / len(groups)
    for number, group in enumerate(groups):
        middle = places + (number - (len(groups) - 1) / 2) * thickness
        axes.barh(middle, group.values, thickness * 0.94, color=group.colour, label=group.legend)
        values, marks = np.array(group.values), np.array(group.marks or np.full(len(names), np.nan))
        if group.marks:
            axes.plot(
                marks,
                middle,
                linestyle="none",
                marker="|",
                markersize=26 * thickness,
                markeredgewidth=2,
                color=VERMILLION,
                label=marks_legend if number == 0 else None,
            )
        for place, value, end in zip(middle, values, np.fmax(values, marks), strict=True):
            text = format(value, form)
            axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.16)
    axes.xaxis.set_major_formatter("{x:,g}")


def save(figure: Figure, folder: Path, name: str, caption: str) -> Path:
    """Write NAME.png with its caption beneath; return its path."""
    text = "\n".join(textwrap.fill(paragraph, _CAPTION_CHARACTERS) for paragraph in caption.strip().split("\n"))
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color="#444444", linespacing=1.35)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI, facecolor="white")
    # A chart has few colours: a palette makes the file a third as large.
    few = Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"figure  {path}")
    return path


def write_table(folder: Path, name: str, rows: Iterable[Mapping[str, object]]) -> Path:
    """Write NAME.csv, a line for each row, columns as the first has them; return its path."""
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
    """Keep six figures of a number: what a reader needs, and the same on every machine; nothing for NaN."""
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"
