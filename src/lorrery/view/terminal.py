"""Tables of numbers that fit the terminal without truncating a digit.

rich truncates cells if a table is too wide, so that `2,320.8` may read `2,320`. A `FigureTable` saves width in this
order, only as far as needed: columns give up spare width, headings break at blanks, names wrap, and finally whole
columns are left out, with a line that names them.
"""

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

__all__ = ["FigureTable", "table_console"]

_ENDLESS = 10_000
_PIPED_COLUMNS = 160


def table_console() -> Console:
    """Return a console for standard output: on a terminal text wraps at words, in a pipe or a file it does not wrap."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, soft_wrap=True, width=_PIPED_COLUMNS)
    return console


@dataclass(frozen=True, slots=True)
class _Column:
    """One column.

    Attributes:
        width: minimum width if there is room.
        wraps_at: minimum width of a column of names, whose cells may wrap; None: numbers, which never wrap.
    """

    heading: str
    justify: Literal["left", "right"]
    width: int
    wraps_at: int | None
    cells: list[Text] = field(default_factory=list)

    @property
    def whole(self) -> int:
        """Width of the longest cell."""
        return max((cell.cell_len for cell in self.cells), default=0)

    @property
    def broken(self) -> int:
        """Width of the longest cell or heading word."""
        return max(self.whole, *map(cell_len, self.heading.split()), 1)

    @property
    def least(self) -> int:
        """Minimum width that truncates neither a number nor a heading word."""
        if self.wraps_at is None:
            return self.broken
        return max(min(self.wraps_at, self.whole), *map(cell_len, self.heading.split()), 1)


class FigureTable:
    """A table that drops columns on a narrow terminal instead of truncating numbers.

    Args:
        first_to_go: headings of the columns to drop first, in this order. The others follow from the right; the first
            column always stays.
        box: as in rich; None: no lines.
        caption: below the table.
    """

    def __init__(self, *, first_to_go: Sequence[str] = (), box: Box | None = None, caption: str | None = None) -> None:
        self._first_to_go = first_to_go
        self._box = box
        self._caption = caption
        self._columns: list[_Column] = []
        self._styles: list[StyleType | None] = []

    def add_column(
        self, heading: str, *, justify: Literal["left", "right"] = "right", width: int = 0, wraps_at: int | None = None
    ) -> None:
        """Add a column.

        Args:
            heading: breaks at its blanks if room is short.
            justify: right for numbers, left for names.
            width: minimum width if there is room.
            wraps_at: width to which a column of names may shrink by wrapping its cells; unset: a column of numbers.
        """
        self._columns.append(_Column(heading, justify, width, wraps_at))

    def add_row(self, *cells: str | Text, style: StyleType | None = None) -> None:
        """Add a row; missing cells stay empty."""
        padded = [*cells, *[""] * (len(self._columns) - len(cells))]
        for column, cell in zip(self._columns, padded, strict=True):
            column.cells.append(Text(cell) if isinstance(cell, str) else cell)
        self._styles.append(style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the columns that fit, and a line about the others."""
        shown, left_out = list(self._columns), list[str]()
        while (widths := self._widths(shown, console, options)) is None and len(shown) > 1:
            gone = self._next_to_go(shown)
            shown.remove(gone)
            left_out.append(gone.heading)
        yield self._table(shown, widths or [column.least for column in shown])
        if left_out:
            needed = self._measure(self._columns, [column.least for column in self._columns], console, options)
            yield Text(f"left out: {', '.join(left_out)}; a terminal of {needed} columns shows all", style="dim")

    def _next_to_go(self, shown: Sequence[_Column]) -> _Column:
        for heading in self._first_to_go:
            for column in shown[1:]:
                if column.heading == heading:
                    return column
        return shown[-1]

    def _widths(self, columns: Sequence[_Column], console: Console, options: ConsoleOptions) -> list[int] | None:
        """Return the largest widths with which the columns fit; None: none do."""
        headings = [cell_len(column.heading) for column in columns]
        roomy = [max(column.width, column.whole, heading, 1) for column, heading in zip(columns, headings, strict=True)]
        close = [max(column.whole, heading, 1) for column, heading in zip(columns, headings, strict=True)]
        broken = [column.broken for column in columns]
        for widths in (roomy, close, broken):
            if self._measure(columns, widths, console, options) <= options.max_width:
                return widths
        excess = self._measure(columns, broken, console, options) - options.max_width
        for index, column in enumerate(columns):
            taken = min(excess, broken[index] - column.least)
            broken[index] -= taken
            excess -= taken
        return broken if excess == 0 else None

    def _measure(
        self, columns: Sequence[_Column], widths: Sequence[int], console: Console, options: ConsoleOptions
    ) -> int:
        endless = options.update(width=_ENDLESS)
        return Measurement.get(console, endless, self._table(columns, widths)).maximum

    def _table(self, columns: Sequence[_Column], widths: Sequence[int]) -> Table:
        broken = [
            textwrap.wrap(column.heading, max(width, 1), break_on_hyphens=False)
            for column, width in zip(columns, widths, strict=True)
        ]
        height = max(map(len, broken))
        table = Table(
            box=self._box,
            header_style="bold",
            pad_edge=False,
            collapse_padding=self._box is not None,
            caption=self._caption,
            caption_justify="left",
        )
        for column, width, lines in zip(columns, widths, broken, strict=True):
            heading = Text("\n".join([""] * (height - len(lines)) + lines))
            table.add_column(heading, justify=column.justify, width=width, overflow="fold")
        for number, style in enumerate(self._styles):
            table.add_row(*(column.cells[number] for column in columns), style=style)
        return table
