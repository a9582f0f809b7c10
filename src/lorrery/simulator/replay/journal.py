"""Reads the scheduler's journal: the inputs of a replay, and the results it must reproduce.

Inputs: requests and cancels with their stamps, the worker figures that placements read, which inputs took effect late
and where, gaps in which a worker stood still, and after which step workers drained or were lost. Expected results:
everything else: where each request went, and one list of plans and steps for each worker.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lorrery.scheduler.subscribers.record import FORMAT_VERSION, Record
from lorrery.service.errors import FormatError
from lorrery.service.files.reading import DAMAGED, damage, open_text

FORMAT_VERSIONS = tuple(range(1, FORMAT_VERSION + 1))
"""Readable versions; see `FORMAT_VERSION`. In version 1 the placement of each request is an input too."""

KIND = "journal"
"""Value of `kind` in its header."""

INPUTS = frozenset(
    {
        *("adapter", "adapter_removed", "faults", "attached", "request", "refused"),
        *("placed", "cancel", "recall", "retire", "load", "drained", "lost"),
    }
)


@dataclass(frozen=True, slots=True)
class Line:
    """An input, and its line number in the file."""

    number: int
    content: Record

    @property
    def type(self) -> str:
        """Record type."""
        kind: str = self.content["type"]
        return kind


@dataclass(frozen=True, slots=True)
class ExpectedPlan:
    """A decision; `record` as described in `scheduler.subscribers.record.Decisions`."""

    line: int
    at_ps: int
    record: Record


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """A step.

    Attributes:
        begin_ps: the boundary before it; the step began `gap_ps` later, which is an input.
        checksum: of its tokens.
        events: as from `scheduler.subscribers.record.describe_events`.
    """

    line: int
    begin_ps: int
    gap_ps: int
    end_ps: int
    checksum: int
    events: Record

    @property
    def at_ps(self) -> int:
        """When it ended."""
        return self.end_ps


@dataclass(frozen=True, slots=True)
class Late:
    """Where an input took effect later than by rule.

    Attributes:
        line: number of the line with this entry.
        boundary_ps: where it took effect; None: it did not, because the worker was lost or drained before.
        missed: number of plans made without it at that very boundary.
    """

    line: int
    boundary_ps: int | None
    missed: int


@dataclass(slots=True)
class WorkerLines:
    """A journal's entries for one worker.

    Attributes:
        expected: its plans and steps, in order.
        late: by the line number of the input.
        stops: after how many of `expected` it drained or was lost, in order.
    """

    expected: list[ExpectedPlan | ExpectedStep] = field(default_factory=list)
    late: dict[int, Late] = field(default_factory=dict)
    stops: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Journal:
    """A journal's content.

    Attributes:
        settings: those of the scheduler, as its settings file would have them.
        version: of the program that wrote it.
        notes_figures: whether it has the figures that placements read.
        has_versions: whether its adapters have versions.
        has_phases: whether it has the phases of requests' time.
        has_modern_kernels: whether its present-day engines run the current kernels.
        inputs: in the order in which the scheduler received them.
        workers: by number, in order of attaching.
        cut_line: number of an incomplete last line; None: all are complete.
        complete: whether the scheduler marked the end.
    """

    settings: Record
    version: str
    notes_figures: bool = True
    has_versions: bool = True
    has_phases: bool = True
    has_modern_kernels: bool = True
    inputs: list[Line] = field(default_factory=list)
    workers: list[WorkerLines] = field(default_factory=list)
    cut_line: int | None = None
    complete: bool = False


BAD_LINE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
"""Errors of a line that is none of a journal's."""


def not_a_line(path: Path, number: int, error: Exception) -> FormatError:
    """Return the error of an invalid line."""
    return FormatError(f"{path}:{number}: is not a line of a journal: {type(error).__name__}: {error}")


def read_journal(path: Path) -> Journal:
    """Read a journal, gzip-compressed or not. An incomplete last line is skipped and recorded in `cut_line`.

    Raises:
        FormatError: unreadable, not a journal, an unknown format version, or an invalid line.
    """
    journal, lines = open_journal(path)
    for number, line in lines:
        try:
            _add(journal, number, json.loads(line))
        except BAD_LINE as error:
            raise not_a_line(path, number, error) from None
    return journal


def open_journal(path: Path) -> tuple[Journal, Iterator[tuple[int, str]]]:
    """Read a journal's header; return the journal without content, and number and text of each further whole line.

    Raises:
        FormatError: as `read_journal`, also while the lines are read.
    """
    lines = _lines(path)
    head = next(lines, "")
    if not head.endswith("\n"):
        raise FormatError(f"{path}: has no header; nothing was written yet, or it is not a journal")
    journal = _header(path, head)

    def rest() -> Iterator[tuple[int, str]]:
        for number, line in enumerate(lines, start=2):
            if line.endswith("\n"):
                yield number, line
            else:
                journal.cut_line = number

    return journal, rest()


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_text(path) as file:
            yield from file
    except DAMAGED as error:
        raise FormatError(damage(path, error)) from None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not a journal: {error}") from None


def _header(path: Path, line: str) -> Journal:
    try:
        header = json.loads(line)
        kind, version = header["kind"], header["format_version"]
        if kind != KIND:
            raise FormatError(f"{path}: holds {kind!r}, not a journal")
        if version not in FORMAT_VERSIONS:
            known = ", ".join(map(str, FORMAT_VERSIONS))
            raise FormatError(f"{path}: format_version {version!r} is not known; this version reads {known}")
        return Journal(
            header["settings"],
            header["lorrery"],
            notes_figures=version >= 2,
            has_versions=version >= 3,
            has_phases=version >= 6,
            has_modern_kernels=version >= 7,
        )
    except KeyError as error:
        raise FormatError(f"{path}: is not a journal: its first line, the header, has no {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"{path}: is not a journal: {error}") from None


def _add(journal: Journal, number: int, content: Record) -> None:
    if content.get("kind") == KIND:
        raise ValueError("another journal begins here; write each to its own file")
    if journal.complete:
        raise ValueError("the journal had ended")
    kind = content["type"]
    if kind == "attached":
        if content["worker"] != len(journal.workers):
            raise ValueError(f"worker {content['worker']} attached as number {len(journal.workers)}")
        journal.workers.append(WorkerLines())
    if kind in INPUTS:
        if kind in ("drained", "lost"):
            worker = journal.workers[content["worker"]]
            worker.stops.append(len(worker.expected))
        journal.inputs.append(Line(number, content))
    elif kind == "plan":
        record = {key: value for key, value in content.items() if key not in ("type", "worker", "at_ps")}
        journal.workers[content["worker"]].expected.append(ExpectedPlan(number, content["at_ps"], record))
    elif kind == "steps":
        journal.workers[content["worker"]].expected += _steps(number, content)
    elif kind == "late":
        late = Late(number, content["boundary_ps"], content.get("missed", 0))
        journal.workers[content["worker"]].late[content["input"]] = late
    elif kind == "end":
        journal.complete = True
    else:
        raise ValueError(f"no line is a {kind!r}")


def _steps(number: int, content: Record) -> Iterator[ExpectedStep]:
    gaps, events = dict(content.get("gaps_ps", ())), dict(content.get("events", ()))
    begin_ps = content["start_ps"]
    for index, (duration_ps, checksum) in enumerate(zip(content["durations_ps"], content["checksums"], strict=True)):
        gap_ps = gaps.get(index, 0)
        end_ps = begin_ps + gap_ps + duration_ps
        yield ExpectedStep(number, begin_ps, gap_ps, end_ps, checksum, events.get(index, {}))
        begin_ps = end_ps
