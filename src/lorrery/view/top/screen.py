"""What is on the screen: lines of exactly the terminal's width and number, from a model and what the user looks at."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from lorrery.view.model import RECENT_SECONDS, Model
from lorrery.view.notices import Notice
from lorrery.view.rules import notices
from lorrery.view.top.tables import TABLES, Column, Figure, Row, Table, count, percent, plain, seconds

NOTICES, EVENTS, HELP = "notices", "events", "help"
VIEWS = (*(table.name for table in TABLES), NOTICES, EVENTS)
"""In the order of their keys, from 1."""
STYLES = {"bad": "bold red", "warn": "yellow", "dim": "dim", "": ""}
_SIGNS = {"bad": "!!", "warn": "! "}
_NAME_WIDTHS, _WIDEST_NAME = (40, 20, 20), 60
_BAR_WIDTHS = 8, 8, 4
KEYS = (
    ("q", "quit"), ("Tab", "next view"), ("s", "sort"), ("/", "filter"), ("Space", "pause"), ("h", "help"),
)  # fmt: skip
HELP_LINES = (
    "1 2 3 4 5 6        workers, adapters, tenants, requests, notices, events",
    "Tab, Shift-Tab     next and previous view",
    "s, S               sort by the next, the previous column",
    "r                  reverse the order",
    "/                  show rows in whose names this text is; Enter keeps it, Esc drops it",
    "Up Down PgUp PgDn  scroll (also k j); Home and End, g and G",
    "Space, p           pause, and go on; sorting and scrolling work meanwhile",
    "Left, Right        of a record: 10 frames back, on",
    "+, -               of a record: twice, half as fast",
    "x                  show lost workers no longer, until one is lost again",
    "h, ?               this help",
    "q, Ctrl-C          quit",
    "",
    "!! something stands still or is lost      ! it goes on, worse than it might",
    "BATCH: sequences that run, the bar against the largest batch seen; LORA: adapters on the GPU + being loaded",
    "TOKENS%: a tenant's part of the tokens of the last 30 s; DEMAND%: its part of the requests that run and wait",
)


@dataclass(slots=True)
class Look:
    """What the user looks at.

    Attributes:
        sorts: of each table: index of a column, and whether its order is reversed.
        text: rows must have it in a name.
        is_typing: whether keys go into `text`.
        status: of the source: that it is lost, or where a record stands.
    """

    view: str = VIEWS[0]
    sorts: dict[str, tuple[int, bool]] = field(default_factory=dict)
    text: str = ""
    is_typing: bool = False
    offset: int = 0
    is_paused: bool = False
    status: str = ""
    is_trouble: bool = False
    unicode: bool = True

    def sort_of(self, table: Table) -> tuple[int, bool]:
        """Return by which column a table is sorted, and whether in reverse."""
        return self.sorts.get(table.name, (table.sort, False))


def compose(model: Model, look: Look, width: int, height: int) -> list[Text]:
    """Return the whole screen: `height` lines of `width` cells."""
    found = notices(model)
    head = [_title(model, look, width), *_summary(model, width, 1 if height < 14 else 3)]
    shown_notices = 0 if height < 12 or look.view == NOTICES else min(len(found), max(1, height // 6))
    head += _notice_lines(found, shown_notices, width)
    num_events = 0 if height < 18 or look.view == EVENTS else min(8, height // 8)
    foot = [*_event_lines(model, num_events, width), _footer(look, width)]
    room = max(0, height - len(head) - len(foot))
    lines = [*head, *_body(model, found, look, width, room)[:room]]
    lines += [Text("")] * (height - len(lines) - len(foot))
    lines = [*lines[: max(0, height - len(foot))], *foot][:height]
    for line in lines:
        line.no_wrap = True
        line.truncate(width)
    return lines


def whole(model: Model, look: Look, width: int, views: Sequence[str]) -> list[Text]:
    """Return everything below each other, as long as it gets: for a pipe or a file."""
    found = notices(model)
    lines = [_title(model, look, width), *_summary(model, width, 9)]
    lines += _notice_lines(found, len(found), width) or [Text("nothing is wrong")]
    for view in views:
        if view == NOTICES:
            continue
        lines.append(Text(""))
        if view == EVENTS:
            lines += _event_lines(model, 20, width)
        else:
            table = next(table for table in TABLES if table.name == view)
            rows = _rows(model, look, table)
            lines += _table_lines(table, look, rows, width)
    for line in lines:
        line.rstrip()
    return lines


def _title(model: Model, look: Look, width: int) -> Text:
    title, name = plain(model.hello.title), plain(model.hello.model)
    left = f" lorrery top  {title if name in title else f'{name}  {title}'}"
    right = f"{'PAUSED  ' if look.is_paused else ''}{clock(model.at)} "
    if look.status:
        status = Text(f" {look.status}")
        status.truncate(max(0, width - cell_len(right) - len(" lorrery top ") - 2), overflow="ellipsis")
        right = f"{status.plain}  {right}"
    room = max(0, width - cell_len(right))
    line = Text(set_cell_size(left, room) + right, "reverse")
    line.truncate(width)
    if look.is_trouble:
        line.stylize("bold red")
    return line


def clock(at: float) -> str:
    """Return device seconds as hours, minutes and seconds."""
    whole_seconds = int(at)
    return f"{whole_seconds // 3600:d}:{whole_seconds // 60 % 60:02d}:{whole_seconds % 60:02d}.{int(at * 10) % 10}"


def _summary(model: Model, width: int, max_lines: int) -> list[Text]:
    totals = model.totals
    percentiles = model.ttft
    ttft = "-" if percentiles is None else f"{seconds(percentiles[0])}, p95 {seconds(percentiles[1])}"
    parts = [
        ("tokens/s", count(model.tokens_per_second)),
        ("requests/s", f"{model.finished.rate(RECENT_SECONDS):.1f}"),
        ("running", count(model.running)),
        ("waiting", count(model.waiting)),
        ("TTFT p50", ttft),
        ("KV", percent(model.kv_ratio)),
        ("workers", f"{len(model.workers)}"),
        ("finished", count(totals.finished)),
    ]
    if model.unplaced or model.held:
        parts.append(("of them without worker, held by quotas", f"{count(model.unplaced)}, {count(model.held)}"))
    ends = {name: getattr(totals, name) for name in ("refused", "cancelled", "dropped", "failed", "preempted")}
    parts += [(name, count(number)) for name, number in ends.items() if number]
    if totals.prefix_queries:
        parts.append(("prefix hits", percent(totals.prefix_hits / totals.prefix_queries)))
    lines = [Text(" ")]
    for name, value in parts:
        part = Text.assemble((f"{name} ", "dim"), (value, "bold"))
        if lines[-1].cell_len > 1 and lines[-1].cell_len + part.cell_len + 2 > width:
            if len(lines) == max_lines:
                break
            lines.append(Text(" "))
        lines[-1].append_text(part).append("  ")
    for line in lines:
        line.truncate(width)
    return lines


def _notice_lines(found: Sequence[Notice], most: int, width: int) -> list[Text]:
    if not most:
        return []
    shown = found if len(found) <= most else found[: most - 1] if most > 1 else found[:1]
    lines = [Text(f"{_SIGNS[notice.severity]} {plain(notice.title)}", STYLES[notice.severity]) for notice in shown]
    if len(found) > len(shown):
        more = f"   and {len(found) - len(shown)} more: key 5"
        if most > 1:
            lines.append(Text(more, "yellow"))
        else:
            lines[0].append(more)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _event_lines(model: Model, most: int, width: int) -> list[Text]:
    if not most:
        return []
    lines = []
    for event in islice(reversed(model.events), most):
        line = Text.assemble((f"{clock(event.at)} ", "dim"), (f"{event.kind:<15} ", "bold"), plain(event.text))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines[::-1]


def _footer(look: Look, width: int) -> Text:
    if look.is_typing:
        line = Text.assemble(("filter: ", "bold"), plain(look.text), ("_", "bold"))
    else:
        line = Text(" ")
        if look.text:
            line.append(f"filter: {plain(look.text)}", "bold yellow").append("  ").append("Esc", "bold").append(
                " all  "
            )
        for key, does in KEYS:
            line.append(key, "bold").append(f" {does}  ")
    line.truncate(width)
    return line


def _body(model: Model, found: Sequence[Notice], look: Look, width: int, height: int) -> list[Text]:
    if look.view == HELP:
        wrapped = (textwrap.wrap(line, max(20, width), subsequent_indent=" " * 4) or [""] for line in HELP_LINES)
        return _scrolled([Text(part) for parts in wrapped for part in parts], look, height)
    tabs = _tabs(look, len(found), width)
    if look.view == NOTICES:
        lines = []
        for notice in found:
            lines += _notice_lines([notice], 1, width)
            lines += [Text(f"   {part}", "dim") for part in textwrap.wrap(plain(notice.why), max(20, width - 4))]
        return [tabs, *_scrolled(lines or [Text("   nothing is wrong")], look, height - 1)]
    if look.view == EVENTS:
        return [tabs, *_scrolled(_event_lines(model, len(model.events), width)[::-1], look, height - 1)]
    table = next(table for table in TABLES if table.name == look.view)
    rows = _rows(model, look, table)
    look.offset = max(0, min(look.offset, len(rows) - (height - 2)))
    shown = rows[look.offset : look.offset + max(0, height - 2)]
    if len(shown) < len(rows):
        where = f" {look.offset + 1}-{look.offset + len(shown)}/{len(rows)} "
        tabs.truncate(max(0, width - len(where)), pad=True)
        tabs.append(where, "dim")
    return [tabs, *_table_lines(table, look, shown, width)]


def _scrolled(lines: list[Text], look: Look, height: int) -> list[Text]:
    look.offset = max(0, min(look.offset, len(lines) - height))
    return lines[look.offset : look.offset + max(0, height)]


def _tabs(look: Look, num_notices: int, width: int) -> Text:
    line = Text(" ")
    for number, view in enumerate(VIEWS, 1):
        name = f"{view} ({num_notices})" if view == NOTICES and num_notices else view
        line.append(f"{number} {name}", "bold underline" if view == look.view else "dim").append(" ")
    line.truncate(width)
    return line


def _rows(model: Model, look: Look, table: Table) -> list[Row]:
    """Return the rows that the filter leaves, in order."""
    text = look.text.casefold()
    rows = [row for row in table.rows(model) if not text or row.matches(text)]
    index, is_reversed = look.sort_of(table)
    for by in (0, index) if index else (0,):  # ties are in the order of the first column
        column = table.columns[by]
        descends = (is_reversed if column.is_name else not is_reversed) if by == index else False
        rows.sort(key=lambda row: _order(column.key(row.values[by])), reverse=descends)
    return rows


def _order(key: float | str) -> float | list[tuple[int, str]]:
    return _natural(key) if isinstance(key, str) else key


@lru_cache(maxsize=4096)
def _natural(name: str) -> list[tuple[int, str]]:
    """Sort worker-2 before worker-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _table_lines(table: Table, look: Look, rows: Sequence[Row], width: int) -> list[Text]:
    cells = [[column.cell(value) for column, value in zip(table.columns, row.values, strict=True)] for row in rows]
    sort, is_reversed = look.sort_of(table)
    arrow = ("^" if is_reversed else "v") if not look.unicode else ("▲" if is_reversed else "▼")
    headings = [f"{column.heading}{arrow if index == sort else ''}" for index, column in enumerate(table.columns)]
    shown, widths, bar = _fit(table.columns, headings, cells, width)
    lines = [_line([_aligned(headings[i], table.columns[i], widths[i], 0, look) for i in shown], width, "bold")]
    for row, row_cells in zip(rows, cells, strict=True):
        parts = [_aligned(row_cells[i], table.columns[i], widths[i], bar, look) for i in shown]
        lines.append(_line(parts, width, STYLES[row.mark]))
    if not rows:
        lines.append(Text(" nothing to show" + (f" with {plain(look.text)!r} in a name" if look.text else ""), "dim"))
    return lines


def _line(parts: Sequence[str], width: int, style: str) -> Text:
    return Text(set_cell_size(" " + " ".join(parts), width), style)


def _fit(
    columns: Sequence[Column], headings: Sequence[str], cells: Sequence[Sequence[Figure | str]], width: int
) -> tuple[list[int], list[int], int]:
    """Return which columns are shown, the width of each of all, and of bars: names and bars shrink, then columns go."""
    longest = [
        max([cell_len(headings[i]), *(cell_len(_text(row[i])) for row in cells)]) for i in range(len(columns))
    ]  # fmt: skip
    has_bar = [any(_share(row[i]) is not None for row in cells) for i in range(len(columns))]
    shown = list(range(len(columns)))
    while True:
        for name_width, bar in zip(_NAME_WIDTHS, _BAR_WIDTHS, strict=True):
            widths = [
                max(cell_len(headings[i]), min(longest[i], name_width)) if columns[i].is_name
                else max(longest[i], bar + 6 if has_bar[i] else 0)
                for i in range(len(columns))
            ]  # fmt: skip
            spare = width - 1 - sum(widths[i] + 1 for i in shown)
            if spare >= 0:
                for i in shown:
                    if columns[i].is_name:
                        more = min(spare, max(0, min(longest[i], _WIDEST_NAME) - widths[i]))
                        widths[i] += more
                        spare -= more
                return shown, widths, bar
        if len(shown) == 1:
            return shown, [max(1, width - 2)] * len(columns), 0
        shown.remove(min(shown[1:], key=lambda i: columns[i].keep))


def _share(cell: Figure | str) -> float | None:
    return cell.share if isinstance(cell, Figure) else None


def _text(cell: Figure | str) -> str:
    return cell.text if isinstance(cell, Figure) else cell


def _aligned(cell: Figure | str, column: Column, width: int, bar: int, look: Look) -> str:
    text, share = _text(cell), _share(cell)
    if share is not None:
        full, empty = ("█", "·") if look.unicode else ("#", ".")
        filled = min(bar, max(round(share * bar), 1 if share > 0 else 0))
        return f"{full * filled}{empty * (bar - filled)}{text.rjust(width - bar)}"
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + ("…" if look.unicode else "~")
    padding = " " * (width - length)
    return text + padding if column.is_name else padding + text
