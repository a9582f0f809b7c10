"""One sweep from points to table: stored points are read, the others run and are stored one by one."""

import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from time import sleep

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from lorrery.loadgen.report import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_OK
from lorrery.loadgen.report_files import check_folder
from lorrery.service.entry_point import SIGNALS
from lorrery.service.installed import missing_extra
from lorrery.simulator.sweep.axes import Axis, parse_axes
from lorrery.simulator.sweep.backends import Run, count, open_backend
from lorrery.simulator.sweep.claims import Claims, PointStore, open_claims
from lorrery.simulator.sweep.flags import SweptFlags, Where
from lorrery.simulator.sweep.outcome import Outcome
from lorrery.simulator.sweep.plot import draw
from lorrery.simulator.sweep.points import Asked, Point, make_points
from lorrery.simulator.sweep.table import FAILED, NOT_RUN, Row, print_table, write_csv, write_parquet
from lorrery.view.reports.report import report
from lorrery.view.reports.sweep import close_calls, unmoved, warned
from lorrery.vocabulary.files import POINTS_FOLDER, SWEEP_FILE


class Share:
    """The points left for one sweep: those that no other sweep of its folder has run or is running.

    Args:
        points: without an outcome yet, by key.
        store: of finished points, shared by all sweeps of the folder.
        claims: to points.
    """

    def __init__(self, points: Mapping[str, Point], store: PointStore, claims: Claims) -> None:
        self._open = dict(points)
        self._store = store
        self._claims = claims
        self._found: list[Outcome] = []

    @property
    def is_open(self) -> bool:
        """Whether some points have no outcome yet."""
        return bool(self._open)

    def take(self) -> Iterator[Point]:
        """Yield points to run, each claimed when requested; points of other sweeps are skipped for now."""
        for key, point in list(self._open.items()):
            # Check twice: the holder may have written and then released it between a check and the claim.
            if self._look(key, point):
                continue
            if self._claims.claim(key):
                if self._look(key, point):
                    self._claims.release(key)
                else:
                    yield point

    def _look(self, key: str, point: Point) -> bool:
        outcome = self._store.read(point)
        if outcome is None and (error := self._claims.failure(key)) is not None:
            outcome = Outcome(key, error=error)
        if outcome is not None:
            self._found.append(outcome)
        return outcome is not None

    def found(self) -> list[Outcome]:
        """Return what other sweeps have finished since the last call."""
        found, self._found = self._found, []
        for outcome in found:
            del self._open[outcome.key]
        return found

    def finish(self, outcome: Outcome) -> None:
        """Store the outcome of a point from `take`."""
        point = self._open.pop(outcome.key)
        if outcome.figures is not None:
            self._store.write(point, outcome)
        self._claims.release(outcome.key, outcome.error)


__all__ = ["sweep"]

PARQUET_FILE = "sweep.parquet"

_LOOK_SECONDS = 0.2
"""Interval between two checks for points finished by other sweeps."""


def sweep(
    context: typer.Context,
    sweeps: Sequence[str],
    asked: Asked,
    out: Path | None,
    where: Where,
    *,
    with_page: bool = True,
) -> int:
    """Run the missing points of a sweep, print and write its table; return the exit code.

    Ctrl-C or SIGTERM ends it; finished points are kept, and the same sweep continues from there. Several sweeps may
    share a folder, here and elsewhere: each point is run by one of them.

    Args:
        context: of the command whose options can be swept.
        sweeps: `KEY=VALUES`.
        asked: base of every point.
        out: folder for points and table; None: nothing is stored.
        where: to run.
        with_page: write report.html too.

    Raises:
        LorreryError: an invalid key or value, folder or backend. Failures of single points are in the table.
    """
    axes = parse_axes(sweeps)
    points = make_points(asked, axes, SweptFlags(context), where.seeds)
    console, progress_console = Console(soft_wrap=False), Console(stderr=True)
    store = None
    if out is not None:
        check_folder(out)
        store = PointStore(out / POINTS_FOLDER, SweptFlags(context).command_line())
    done: dict[str, Outcome] = {}
    missing: dict[str, Point] = {}
    for point in points:
        if point.run is None:
            _tell_failure(progress_console, point, point.refused)
        elif store is not None and (kept := store.read(point)) is not None:
            done[point.key] = kept
        else:
            missing[point.key] = point
    if done:
        progress_console.print(f"{len(done):,} of {len(points):,} points are there already", highlight=False)
    interrupted = bool(missing) and not _Runner(where, done, progress_console).run(missing, store)
    by_values = groupby(points, lambda point: tuple(point.values.values()))
    rows = [Row.of(list(of_row), done) for _, of_row in by_values]
    print_table(console, axes, rows)
    ran = [(row.point.values, row.figures) for row in rows if row.figures is not None]
    rounds = [[one.figures for point in row.points if (one := done[point.key]).figures] for row in rows if row.figures]
    told = close_calls([values for values, _ in ran], rounds)
    for line in (*unmoved([axis.key for axis in axes], ran), *told, *_warnings(points, done)):
        console.print(f"! {line}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    for path in _write(out, axes, rows, console, with_page=with_page) if out is not None else ():
        console.print(f"report    {path}", style="dim", highlight=False, soft_wrap=True)
    num_failed, num_open = (sum(row.status == status for row in rows) for status in (FAILED, NOT_RUN))
    if num_failed:
        console.print(f"{num_failed:,} of {len(rows):,} points failed", style="bold red", highlight=False)
    if interrupted:
        how = "the same command goes on from here" if out is not None else "with --out DIR it could go on"
        console.print(f"interrupted: {num_open:,} points did not run; {how}", style="yellow", highlight=False)
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if num_failed else EXIT_OK


class _Alike(Exception):  # noqa: N818  an ending, as KeyboardInterrupt is
    """The points that have no swept value in common failed with the same error, and no other one has run."""


class _Runner:
    """Runs missing points, into `done` and the store, and shows the progress.

    The first point is followed by the last one. If none has run yet and these two, with no swept value in common, fail
    with the same error, no swept value is its cause, and the others are left out.
    """

    def __init__(self, where: Where, done: dict[str, Outcome], console: Console) -> None:
        self._where = where
        self._done = done
        self._console = console
        self._num_failed = 0
        self._opposite: tuple[str, ...] = ()

    def run(self, missing: dict[str, Point], store: PointStore | None) -> bool:
        """Run points; False if a signal ended it."""
        first, *_, last = [*missing, *missing]
        if first != last and _have_nothing_in_common(missing[first], missing[last], missing.values()):
            self._opposite = first, last
            missing = {key: missing[key] for key in (first, last)} | missing
        with ExitStack() as stack:
            try:
                stack.enter_context(_interruptible())
                claims = None if store is None else stack.enter_context(open_claims(store.folder))
                run, place = stack.enter_context(open_backend(self._where, len(missing)))
                self._console.print(f"{count(len(missing), 'point')} to run on {place}", highlight=False)
                progress = stack.enter_context(_progress(self._console))
                bar = progress.add_task("", total=len(missing), failed="", expected_seconds=None)
                if store is None or claims is None:
                    self._take_in(run, missing.values(), missing, progress, bar, None)
                else:
                    self._run_shared(run, missing, Share(missing, store, claims), claims, progress, bar)
            except KeyboardInterrupt:
                return False
            except _Alike:
                why = "the first and the last, with no swept value in common, failed with the same error"
                self._console.print(f"the other points do not run: {why}", style="yellow", soft_wrap=True)
        return True

    def _run_shared(
        self, run: Run, missing: dict[str, Point], share: Share, claims: Claims, progress: Progress, bar: TaskID
    ) -> None:
        """Run the points that no other sweep of the folder runs, and wait for the others."""
        told = False
        while True:
            self._take_in(run, share.take(), missing, progress, bar, share)
            for outcome in share.found():
                self._note(missing[outcome.key], outcome, progress, bar)
            self._end_if_alike()
            if not share.is_open:
                return
            if not told:
                told = True
                who = " and ".join(claims.others()) or "another sweep"
                self._console.print(f"the other points are run by {who}; waiting for them", highlight=False)
            sleep(_LOOK_SECONDS)

    def _take_in(
        self, run: Run, points: Iterable[Point], missing: dict[str, Point], progress: Progress, bar: TaskID,
        share: Share | None,
    ) -> None:  # fmt: skip
        with closing(run(points)) as outcomes:
            for outcome in outcomes:
                self._note(missing[outcome.key], outcome, progress, bar)
                if share is not None:
                    share.finish(outcome)
                self._end_if_alike()

    def _note(self, point: Point, outcome: Outcome, progress: Progress, bar: TaskID) -> None:
        self._done[outcome.key] = outcome
        if outcome.figures is None:
            self._num_failed += 1
            _tell_failure(self._console, point, outcome.error)
        failed = f"[red]{self._num_failed} failed" if self._num_failed else ""
        progress.update(bar, advance=1, failed=failed, refresh=True)
        task = progress.tasks[bar]
        expected_seconds = (task.elapsed or 0.0) / task.completed * (task.total or 0.0)
        progress.update(bar, expected_seconds=expected_seconds)

    def _end_if_alike(self) -> None:
        if self._num_failed == len(self._done):
            errors = [self._done[key].error for key in self._opposite if key in self._done]
            if len(errors) == 2 and errors[0] == errors[1]:
                raise _Alike


def _have_nothing_in_common(one: Point, other: Point, points: Iterable[Point]) -> bool:
    """Return whether two points differ in every key in which some points do."""
    rows = [point.values for point in points]
    return all(one.values[key] != other.values[key] or len({row[key] for row in rows}) == 1 for key in one.values)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let signals end running points, and suppress joblib's long warnings about unfinished ones."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="joblib")
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _TimeLeftColumn(ProgressColumn):
    """The time left, from the mean of all points: rich's own uses the last ones, which end in bunches."""

    def render(self, task: Task) -> Text:
        """Return the time left, as `0:01:30 left`."""
        expected_seconds: float | None = task.fields["expected_seconds"]
        if expected_seconds is None:
            return Text("-:--:-- left")
        return Text(f"{timedelta(seconds=round(max(0.0, expected_seconds - (task.elapsed or 0.0))))} left", "cyan")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]sweep"),
        BarColumn(bar_width=max(4, min(30, console.width - 50))),  # shrinks to make room for the figures
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
        _TimeLeftColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _tell_failure(console: Console, point: Point, error: str) -> None:
    console.print(Text.assemble(("failed  ", "red"), f"{point.title}: {error}"), soft_wrap=True)


def _warnings(points: Sequence[Point], done: Mapping[str, Outcome]) -> list[str]:
    """Return the points' warnings for readers of their figures."""
    ended = [(point.title, done[point.key]) for point in points if point.key in done]
    return warned(len(points), [(title, text) for title, outcome in ended for text in outcome.warnings])


def _write(folder: Path, axes: Sequence[Axis], rows: Sequence[Row], console: Console, *, with_page: bool) -> list[Path]:
    """Write table, plots and page; return the existing files."""
    written = [folder / SWEEP_FILE]
    write_csv(written[0], axes, rows)
    if write_parquet(folder / PARQUET_FILE, axes, rows):
        written.append(folder / PARQUET_FILE)
    else:
        console.print(missing_extra("parquet", PARQUET_FILE), style="yellow", markup=False)
    plots = draw(folder, axes, rows)
    if plots is None:
        console.print(missing_extra("plot", "a plot"), style="yellow", markup=False)
    return [*written, *(plots or ()), *([report(folder)] if with_page else [])]
