"""Small charts as SVG without a script: lines over a linear or logarithmic axis, and stacked bars.

Positions are in percent, text has a fixed size, and lines keep their width (`vector-effect`), so that one chart fits a
phone and a wide screen. Colours and dashes are classes `s0`, `s1`, ... of the page's style sheet. The page's script
reads values back from the paths, with the scales in `data-x` and `data-y`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

__all__ = ["Axis", "Line", "lines", "number", "seconds", "stack", "swatch"]

Floats = npt.NDArray[np.float64]

_SIZE = 1000
"""Side of the square that paths are drawn in, stretched to the chart."""
_STYLES = 8
_LOG_DECADES = 4
"""With more decades than these, ticks are at powers of ten only."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale.

    Attributes:
        unit: `s` is shown as us, ms or s; others follow the number.
        low: None: from the values.
        high: likewise.
        marked: values that get the ticks; empty: round ones.
    """

    label: str
    unit: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    marked: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Points of one line, in order of x; NaN leaves a gap.

    Attributes:
        style: number of its colour and dash.
        marks: draw a mark at each point, for few points.
        low, high: of a bar at each point, as for the spread over seeds.
    """

    name: str
    x: Floats
    y: Floats
    style: int = 0
    marks: bool = False
    hollow: bool = False
    low: Floats = field(default_factory=lambda: np.empty(0))
    high: Floats = field(default_factory=lambda: np.empty(0))


def lines(title: str, x: Axis, y: Axis, drawn: Sequence[Line], *, labels: Sequence[str] = (), note: str = "") -> Markup:
    """Draw lines.

    Args:
        title: of the chart.
        x: the scale along.
        y: the scale up.
        drawn: the lines, the first at the bottom.
        labels: of a non-numeric x axis, whose points are at 0, 1, 2, ...
        note: a line below the title.
    """
    across = _Scale(x, np.concatenate([line.x for line in drawn] or [np.empty(0)]), room=0.5 if labels else 0.0)
    up = _Scale(y, np.concatenate([part for line in drawn for part in (line.y, line.low, line.high)] or [np.empty(0)]))
    parts = [
        f'<figure class="chart" data-x="{across.told}" data-y="{up.told}"{" data-names" if labels else ""}>',
        f"<figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>",
    ]
    if not any(np.isfinite(line.y).any() for line in drawn):
        return Markup("".join([*parts, '<p class="none">nothing to show</p></figure>']))  # noqa: S704  all escaped
    parts.append(
        f'<svg class="plot" role="img" aria-label="{escape(title)}: {escape(y.label)} over {escape(x.label)}">'
    )
    for at, text in up.ticks():
        place = _per_cent(1 - at)
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{place}" y2="{place}"/>')
        parts.append(f'<text class="y" x="0" y="{place}" dx="-6" dy=".33em">{escape(text)}</text>')
    ticks = _named_ticks(labels, across) if labels else across.ticks()
    for number_, (at, text) in enumerate(ticks):
        odd = " odd" if number_ % 2 and len(ticks) > 4 else ""
        parts.append(f'<line class="grid{odd}" x1="{_per_cent(at)}" x2="{_per_cent(at)}" y1="0" y2="100%"/>')
        parts.append(f'<text class="x{odd}" x="{_per_cent(at)}" y="100%" dy="1.35em">{escape(text)}</text>')
    parts.append(f'<text class="name" x="100%" y="100%" dy="2.7em">{escape(x.label)}</text>')
    parts.append(f'<text class="name top" x="0" y="0" dy="-.75em">{escape(y.label)}</text>')
    parts.append('<svg class="paths" viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">')
    alone = len(drawn) == 1 and not drawn[0].marks and not x.log and not y.log and len(drawn[0].x) > 1
    for line in drawn:
        places = across.places(line.x) * _SIZE, (1 - up.places(line.y)) * _SIZE
        if alone and np.isfinite(line.y).all():
            area = _path(*places) + f"L{places[0][-1]:.0f} {_SIZE}L{places[0][0]:.0f} {_SIZE}Z"
            parts.append(f'<path class="area s{line.style % _STYLES}" d="{area}"/>')
        dashed = " hollow" if line.hollow else ""
        parts.append(
            f'<path class="line s{line.style % _STYLES}{dashed}" data-name="{escape(line.name)}" d="{_path(*places)}">'
            f"<title>{escape(line.name)}</title></path>"
        )
    parts.append("</svg>")
    for line in drawn:
        if line.marks:
            parts += _marks(line, across, up)
    parts.append("</svg></figure>")
    return Markup("".join(parts))  # noqa: S704  text in it is escaped, the rest are numbers


def stack(label: str, total: str, parts: Sequence[tuple[str, float, int, str]]) -> Markup:
    """Draw one bar of parts that make a whole: for each its name, share, style and value as text."""
    drawn = [f'<div class="stack"><span>{escape(label)}</span><svg role="img" aria-label="{escape(label)}">']
    at = 0.0
    for name, part, style, value in parts:
        share = max(0.0, min(part, 1.0))
        drawn.append(
            f'<rect class="f{style % _STYLES}" x="{_per_cent(at)}" width="{_per_cent(share)}" height="100%">'
            f"<title>{escape(name)}: {escape(value)}, {share:.1%}</title></rect>"
        )
        if share > 0.14:
            middle = _per_cent(at + share / 2)
            drawn.append(f'<text class="on{style % _STYLES}" x="{middle}" y="50%" dy=".35em">{escape(value)}</text>')
        at += share
    drawn.append(f"</svg><b>{escape(total)}</b></div>")
    return Markup("".join(drawn))  # noqa: S704  as above


def swatch(name: str, style: int, *, filled: bool = False, hollow: bool = False) -> Markup:
    """Draw an entry of a legend."""
    if filled:
        sample = f'<svg class="key" viewBox="0 0 22 10"><rect class="f{style % _STYLES}" width="14" height="10"/></svg>'
    else:
        dashed = " hollow" if hollow else ""
        sample = (
            f'<svg class="key" viewBox="0 0 22 10"><path class="line s{style % _STYLES}{dashed}" d="M0 5H22"/></svg>'
        )
    return Markup(f'<span class="entry">{sample}<bdi>{escape(name)}</bdi></span>')  # noqa: S704  as above


def seconds(value: float) -> str:
    """Format a time with three digits, in a suitable unit."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f} s"
    if size >= 0.99995:
        return f"{value:.3g} s"
    if size >= 0.99995e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us" if size else "0 s"


def number(value: float) -> str:
    """Format a number with three digits, or with its whole integer part if that is longer."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


class _Scale:
    """Positions of values along an axis, from 0 to 1."""

    def __init__(self, axis: Axis, values: Floats, *, room: float = 0.0) -> None:
        finite = values[np.isfinite(values)]
        if axis.log:
            finite = finite[finite > 0]
        self._axis, self._log = axis, axis.log and len(finite) > 0
        low = axis.low if axis.low is not None else float(finite.min(initial=math.inf)) if len(finite) else 0.0
        high = axis.high if axis.high is not None else float(finite.max(initial=-math.inf)) if len(finite) else 1.0
        if self._log:
            low, high = math.log10(low), math.log10(high)
            if high - low < 0.3:
                low, high = low - 0.15, high + 0.15
        else:
            low, high = low - room, high + room
            if axis.high is None and not room:
                high = low + (high - low) * 1.04
            if high <= low:
                high = low + (abs(low) or 1.0)
        self._low, self._high = low, high

    @property
    def told(self) -> str:
        """Parameters of the scale for the script."""
        kind = "log" if self._log else "lin"
        return f"{kind} {self._low:.6g} {self._high:.6g} {escape(self._axis.unit)}"

    def places(self, values: Floats) -> Floats:
        """Return the positions of values; NaN where there is none."""
        if self._log:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.where(values > 0, np.log10(values), np.where(values == 0, self._low, np.nan))
        return (values - self._low) / (self._high - self._low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and texts of some five round values."""
        values = list(self._axis.marked) or (self._log_ticks() if self._log else self._round_ticks())
        places = self.places(np.array(values))
        return [
            (float(at), self._text(value)) for at, value in zip(places, values, strict=True) if -1e-9 <= at <= 1 + 1e-9
        ]

    def _text(self, value: float) -> str:
        unit = self._axis.unit
        if unit == "s":
            return seconds(value)
        if unit == "%":
            return f"{number(value)} %"
        for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
            if abs(value) >= size:
                return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
        return number(value)

    def _log_ticks(self) -> list[float]:
        low, high = math.floor(self._low), math.ceil(self._high)
        decades = self._high - self._low
        factors = (1,) if decades > _LOG_DECADES else (1, 3) if decades > 1.7 else (1, 2, 5)
        found = [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
        if decades < 0.5:
            return _round_values(10**self._low, 10**self._high, most=7)
        return found

    def _round_ticks(self) -> list[float]:
        return _round_values(self._low, self._high)


def _round_values(low: float, high: float, most: int = 5) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(number_ * step, 12) for number_ in range(first, math.floor(high / step + 1e-9) + 1)]


def _named_ticks(labels: Sequence[str], across: _Scale) -> list[tuple[float, str]]:
    places = across.places(np.arange(len(labels), dtype=np.float64))
    return [
        (float(at), label if len(label) <= 18 else f"{label[:17]}...") for at, label in zip(places, labels, strict=True)
    ]


def _per_cent(share: float) -> str:
    return f"{share * 100:.2f}%"


def _path(x: Floats, y: Floats) -> str:
    text: list[str] = []
    pen = "M"
    for at, high in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(at) and math.isfinite(high):
            text.append(f"{pen}{at:.1f} {min(max(high, -_SIZE), 2 * _SIZE):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(text)


def _marks(line: Line, across: _Scale, up: _Scale) -> list[str]:
    found = []
    style = f"s{line.style % _STYLES}"
    x, y = across.places(line.x), 1 - up.places(line.y)
    for at, high in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(at) and math.isfinite(high):
            full = "" if line.hollow else f" m{line.style % _STYLES}"
            found.append(f'<circle class="mark {style}{full}" cx="{_per_cent(at)}" cy="{_per_cent(high)}" r="3"/>')
    if len(line.low):
        bottoms, tops = 1 - up.places(line.low), 1 - up.places(line.high)
        for at, bottom, top in zip(x.tolist(), bottoms.tolist(), tops.tolist(), strict=True):
            if math.isfinite(bottom) and bottom - top > 1e-4:
                place, ends = _per_cent(at), f'y1="{_per_cent(bottom)}" y2="{_per_cent(top)}"'
                found.append(f'<line class="spread {style}" x1="{place}" x2="{place}" {ends}/>')
    return found


def interval(low: float, middle: float, high: float, limit: float) -> Markup:
    """Draw an interval around 0 within a table cell; beyond `limit` it ends at the edge."""

    def place(value: float) -> str:
        return _per_cent(0.5 + 0.48 * max(-1.0, min(1.0, value / limit if limit > 0 else 0.0)))

    return Markup(  # noqa: S704  numbers
        f'<svg class="interval" aria-hidden="true"><line class="zero" x1="50%" x2="50%" y1="0" y2="100%"/>'
        f'<line class="range" x1="{place(low)}" x2="{place(high)}" y1="50%" y2="50%"/>'
        f'<circle cx="{place(middle)}" cy="50%" r="3.5"/></svg>'
    )
