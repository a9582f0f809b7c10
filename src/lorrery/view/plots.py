"""One look for every plot of the tree: palette, line styles, caption, and files that are the same every time.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; each comes with a marker and a hatch, so that
lines and bars are told apart in grey too. A caption beneath names model, GPU and workload. Figures are laid out for
the width at which a README shows them, so that 9 points there are 9 points.

matplotlib is the extra `plot`, and is imported only when something is drawn: within `drawing`.
"""

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.files.writing import check_writable
from lorrery.service.installed import need_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
BLACK, GREY, PALE = "#222222", "#767676", "#c9ced3"
WIDTH_INCHES = 8.4
"""About 840 pixels at 100 to the inch: a README's column."""
SUFFIXES = (".svg", ".png", ".pdf")
_DPI = 150
_CAPTION_CHARACTERS, _CAPTION_POINTS = 125, 8.0
"""Of a caption's line: as many as fill the width."""
_PNG_COLOURS = 128
_RC: Mapping[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7ea",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.title_fontsize": 8.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lorrery",  # ids do not change from run to run
}


@dataclass(frozen=True, slots=True)
class Series:
    """How one of several lines or groups of bars is drawn: no two of 49 are alike, and no two of seven in grey."""

    colour: str
    marker: str
    hatch: str


_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++")


def series(index: int) -> Series:
    """Return the style of the line, or group of bars, with this number; after seven, colours meet other markers."""
    turn, place = divmod(index, len(_COLOURS))
    other = (place + turn) % len(_MARKERS)
    return Series(_COLOURS[place], _MARKERS[other], _HATCHES[other])


def check(option: str, path: Path) -> None:
    """Check, before the figures are made, that a plot can be drawn and written under this name.

    Raises:
        SettingsError: the name has another ending than those of `SUFFIXES`, or no file can be written there.
        SettingsError: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise SettingsError(f"{option} {path}: the name must end in {', '.join(SUFFIXES)}")
    check_writable(option, path)
    need_extra("plot", option)


@contextmanager
def drawing(what: str) -> Iterator[None]:
    """Draw in this style within; the caller's own settings of matplotlib neither show nor change.

    Args:
        what: needs it, for the error: an option or a command.

    Raises:
        SettingsError: matplotlib is not installed.
    """
    need_extra("plot", what)
    from matplotlib import style

    with style.context(["default", dict(_RC)]):
        yield


def canvas(rows: int, columns: int, height_inches: float) -> "tuple[Figure, list[Axes]]":
    """Make a figure as wide as a README shows it; return it with its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)  # type: ignore[union-attr,call-arg]  # the constrained one
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())


def legend_above(figure: "Figure", axes: "Axes", columns: int) -> None:
    """Put the legend of `axes` above all axes, where no data is."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def save(figure: "Figure", path: Path, caption: str) -> Path:
    """Write the figure with its caption beneath, in the format that the name's ending says; return the path.

    The same figure gives the same bytes: no time stamp, no random ids. A PNG gets a palette, a third of the size.

    Raises:
        LorreryError: the file cannot be written.
    """
    lines = (
        textwrap.fill(paragraph, _CAPTION_CHARACTERS, break_on_hyphens=False)
        for paragraph in caption.strip().split("\n")
    )
    figure.supxlabel(
        "\n".join(lines), x=0.01, ha="left", fontsize=_CAPTION_POINTS, color="#444444", linespacing=1.35
    )  # fmt: skip
    drawn = BytesIO()
    kind = path.suffix.removeprefix(".")
    if kind == "png":
        figure.savefig(drawn, format="png", dpi=_DPI)
        drawn = _with_palette(drawn)
    else:
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
        figure.savefig(drawn, format=kind, metadata=undated)
    try:
        path.write_bytes(drawn.getvalue())
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None
    return path


def _with_palette(drawn: BytesIO) -> BytesIO:
    from PIL import Image  # comes with matplotlib

    small = BytesIO()
    image = Image.open(drawn).convert("RGB").quantize(_PNG_COLOURS, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small
