"""`lorrery simulate --journal FILE`: replays a live scheduler's journal and checks that the simulator agrees."""

from pathlib import Path

from rich.console import Console

from lorrery.service.installed import VERSION
from lorrery.simulator.replay.journal import Journal, read_journal
from lorrery.simulator.replay.parts import Replayed, parts_of
from lorrery.simulator.replay.replay import replay
from lorrery.vocabulary.adapters import AdapterFigures

EQUAL, DIFFERENT = 0, 1


def replay_journal(path: Path, console: Console) -> int:
    """Replay a journal and print what was compared; return the exit code: 0 if all is equal, 1 if not.

    Raises:
        FormatError: the file cannot be read, or is no journal.
        SettingsError: its settings do not work here, such as a missing file that they name.
    """
    journal = read_journal(path)
    result = replay(journal, parts_of(journal, path))
    _print(path, journal, result, console)
    return DIFFERENT if result.differences else EQUAL


def _print(path: Path, journal: Journal, result: Replayed, console: Console) -> None:
    if journal.version != VERSION:
        console.print(f"{path} was written by lorrery {journal.version}; this is {VERSION}", highlight=False)
    if journal.cut_line is not None:
        console.print(f"{path}:{journal.cut_line}: the line is cut off and is left out", highlight=False)
    if not journal.complete:
        console.print(
            f"{path} has no end: the scheduler runs, or was killed; compared is what it had flushed", highlight=False
        )
    console.print(
        f"compared {result.num_requests} requests, {result.num_plans} plans, {result.num_steps} steps and"
        f" {result.num_tokens} tokens on {result.num_workers} workers",
        highlight=False,
    )
    console.print(
        f"derived: where {result.num_derived} of {result.num_placed} requests went; the others had no choice"
        ", or it is given",
        highlight=False,
    )
    console.print(
        f"given: {result.num_requests} arrivals, {result.num_cancels} cancels, {result.num_late} of them late;"
        f" {result.num_gaps} gaps; {result.num_lost} workers that left",
        highlight=False,
    )
    if result.tally.by_adapter:
        console.print(f"adapters: {AdapterFigures.total(result.tally.by_adapter.values())}", highlight=False)
    if not result.num_steps and not result.differences:
        console.print("nothing to compare: no step is in it", highlight=False)
    elif not result.differences:
        console.print("equal: every batch, every time and every token", highlight=False)
    for line, what in result.differences:
        console.print(f"{path}:{line}: {what}", style="red", highlight=False, markup=False)
