"""A sweep as a table: CSV, Parquet, and on the terminal. One row per combination of values, in the order of the points.

Columns: the swept keys, `status` (ok, failed, not run), `error`, and the figures. Missing values are empty. If rows are
of several seeds, figures are their means, `num_seeds` says of how many, and `NAME_ci95` has half of the 95 % interval
in which the mean of `NAME` lies. `points` names the files of the runs.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from pathlib import Path

from rich import box
from rich.console import Console
from rich.text import Text

from lorrery.service.installed import has_extra
from lorrery.simulator.sweep.axes import Axis, Value
from lorrery.simulator.sweep.claims import replace_file
from lorrery.simulator.sweep.outcome import COUNTS, FIGURES, SCALING, Figure, Outcome
from lorrery.simulator.sweep.points import Point
from lorrery.view.reports.sweep import CI95, NUM_SEEDS, POINTS
from lorrery.view.terminal import FigureTable
from lorrery.vocabulary.files import CPU_SECONDS
from lorrery.vocabulary.intervals import mean_and_margin

__all__ = ["FAILED", "NOT_RUN", "OK", "Row", "print_table", "short_names", "write_csv", "write_parquet"]

OK, FAILED, NOT_RUN = "ok", "failed", "not run"

MEANS = "; means over the seeds ± half of their 95 % interval"
_MOST_ROWS = 40
_SHOWN = (
    ("req/s", "requests_per_second"),
    ("tokens/s", "output_tokens_per_second"),
    ("TTFT p50", "ttft_ms_p50"),
    ("TTFT p99", "ttft_ms_p99"),
    ("TPOT p50", "tpot_ms_p50"),
)
_IF_ANY = (
    ("GPU hours", "gpu_hours"),
    ("good %", "good_ratio"),
    ("failed", "num_failed"),
    ("cached", "cached_tokens"),
    ("requeued", "num_requeues"),
)
_FIRST_TO_GO = ("requeued", "cached", "req/s", "TPOT p50", "TTFT p50")
"""Columns dropped first if the terminal is too narrow."""
_LEAST_NAME = 12
_STYLES = {OK: "", FAILED: "red", NOT_RUN: "yellow"}


@dataclass(frozen=True, slots=True)
class Row:
    """One combination and its result.

    Attributes:
        points: its runs, one per seed.
        figures: means over the seeds; None if not all have run.
        margins: half of the 95 % interval of each; empty for one seed.
    """

    points: Sequence[Point]
    status: str = NOT_RUN
    error: str = ""
    figures: dict[str, Figure] | None = None
    margins: Mapping[str, float] = field(default_factory=dict)

    @property
    def point(self) -> Point:
        """Its first run."""
        return self.points[0]

    @classmethod
    def of(cls, points: Sequence[Point], done: Mapping[str, Outcome]) -> "Row":
        """Make the row of some points, given the outcomes by key."""
        outcomes = [done.get(point.key) for point in points]
        refused = next((point.refused for point in points if point.run is None), "")
        errors = (one.error for one in outcomes if one is not None and one.figures is None)
        if error := refused or next(errors, ""):
            return cls(points, FAILED, error)
        rounds = [one.figures for one in outcomes if one is not None and one.figures is not None]
        if len(rounds) < len(points):
            return cls(points)
        if len(points) == 1:
            return cls(points, OK, "", rounds[0])
        means, margins = dict[str, Figure](), dict[str, float]()
        for name in FIGURES:
            mean, margin = mean_and_margin(math.nan if (value := one[name]) is None else value for one in rounds)
            means[name] = None if math.isnan(mean) else mean
            if math.isfinite(margin) and name != CPU_SECONDS:
                margins[name] = margin
        return cls(points, OK, "", means, margins)

    def figure(self, name: str) -> Figure:
        """Return a figure; None if there is none."""
        return None if self.figures is None else self.figures[name]


def write_csv(path: Path, axes: Sequence[Axis], rows: Sequence[Row]) -> None:
    """Write the table as CSV; numbers with all their digits.

    Raises:
        LorreryError: it cannot be written.
    """
    columns = dict(_columns(axes, rows))
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    replace_file(path, text.getvalue().encode())


def write_parquet(path: Path, axes: Sequence[Axis], rows: Sequence[Row]) -> bool:
    """Write the table as Parquet, its columns typed; False if pyarrow is not installed.

    Raises:
        LorreryError: it cannot be written.
    """
    if not has_extra("parquet"):
        return False
    import pyarrow as pa
    from pyarrow import parquet

    types = {int: pa.int64(), float: pa.float64(), str: pa.string()}
    kinds: dict[str, type[Value]] = {axis.key: type(axis.values[0]) for axis in axes}
    kinds |= {"status": str, "error": str}
    kinds |= {NUM_SEEDS: int, POINTS: str}
    if not any(row.margins for row in rows):
        kinds |= dict.fromkeys(COUNTS, int)
    columns = {name: pa.array(values, types[kinds.get(name, float)]) for name, values in _columns(axes, rows)}
    content = BytesIO()
    parquet.write_table(pa.table(columns), content)
    replace_file(path, content.getvalue())
    return True


def print_table(console: Console, axes: Sequence[Axis], rows: Sequence[Row]) -> None:
    """Print the swept values and the main figures."""
    table = FigureTable(
        box=box.SIMPLE_HEAD,
        first_to_go=_FIRST_TO_GO,
        caption=f"times in ms{MEANS if any(row.margins for row in rows) else ''}",
    )
    for axis, name in zip(axes, short_names(axes), strict=True):
        if axis.is_numeric:
            table.add_column(name)
        else:
            table.add_column(name, justify="left", wraps_at=_LEAST_NAME)
    shown = [
        (title, name)
        for title, name in (*_SHOWN, *_IF_ANY)
        if (title, name) in _SHOWN
        or any(row.figure(name) for row in rows)
        or (name in SCALING and any(row.figure(name) is not None for row in rows))
    ]
    all_ran = all(row.figures is not None for row in rows[:_MOST_ROWS])
    if not all_ran:
        table.add_column("status", justify="left")
    for title, _ in shown:
        table.add_column(title)
    for row in rows[:_MOST_ROWS]:
        cells: list[str | Text] = [str(value) for value in row.point.values.values()]
        if not all_ran:
            cells.append(Text(row.status, style=_STYLES[row.status]))
        if row.figures is not None:
            cells += [_with_margin(row, name) for _, name in shown]
        table.add_row(*cells)
    console.print(table)
    if len(rows) > _MOST_ROWS:
        console.print(f"the first {_MOST_ROWS} of {len(rows):,} points", style="dim", highlight=False)


def short_names(axes: Sequence[Axis]) -> list[str]:
    """Return the last part of each key (`policy` of `scheduler.policy`), or all of it if two end alike."""
    last = [axis.key.rpartition(".")[2] for axis in axes]
    return [name if last.count(name) == 1 else axis.key for axis, name in zip(axes, last, strict=True)]


def _columns(axes: Sequence[Axis], rows: Sequence[Row]) -> Iterator[tuple[str, list[Figure | str]]]:
    for axis in axes:
        yield axis.key, [row.point.values[axis.key] for row in rows]
    yield "status", [row.status for row in rows]
    yield "error", [row.error for row in rows]
    is_scaled = any(row.figure("gpu_hours") is not None for row in rows)
    names = [name for name in FIGURES if is_scaled or name not in SCALING]
    has_margins = any(row.margins for row in rows)
    if has_margins:
        yield NUM_SEEDS, [len(row.points) for row in rows]
    for name in names:
        yield name, [row.figure(name) for row in rows]
    for name in names if has_margins else ():
        if name != CPU_SECONDS:
            yield f"{name}{CI95}", [row.margins.get(name) for row in rows]
    yield POINTS, [" ".join(point.key for point in row.points) for row in rows]


def _with_margin(row: Row, name: str) -> Text:
    text = Text(_cell(name, row.figure(name)))
    if (margin := row.margins.get(name)) is not None:
        text.append(f" ±{_cell(name, margin)}", "dim")
    return text


def _cell(name: str, value: Figure) -> str:
    if value is None or name not in SCALING:
        return _number(value)
    return f"{100 * value:.2f}" if name == "good_ratio" else f"{value:,.2f}"


def _number(value: Figure) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if abs(value) < 1e4 else f"{value:,.0f}"
