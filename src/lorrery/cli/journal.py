"""Prints what a journal's replay compared, and what other settings would have made of its traffic."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.text import Text

from lorrery.loadgen.workload.summary import BASE_MODEL
from lorrery.service.installed import VERSION
from lorrery.simulator.paired import PairedDifference
from lorrery.simulator.replay.journal import Journal, read_journal
from lorrery.simulator.replay.parts import Replayed, parts_of
from lorrery.simulator.replay.replay import replay
from lorrery.view.terminal import FigureTable
from lorrery.vocabulary.adapters import AdapterFigures

_MOST_OF_A_GROUP = 6
_NAMELESS = {"adapter": BASE_MODEL, "tenant": "-"}
_OF_GROUPS = "e2e"
"""The metric of tenants and adapters; differences.csv has all."""


def replay_journal(path: Path, console: Console) -> int:
    """Replay a journal and print what was compared; return the exit code: 0 if all is equal, 1 if not.

    Raises:
        FormatError: the file cannot be read, or is no journal.
        SettingsError: its settings do not work here, such as a missing file that they name.
    """
    journal = read_journal(path)
    result = replay(journal, parts_of(journal, path))
    _print_replay(path, journal, result, console)
    return 1 if result.differences else 0


def _print_replay(path: Path, journal: Journal, result: Replayed, console: Console) -> None:
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


def print_paired(differences: Sequence[PairedDifference], console: Console) -> None:
    """Print the mean differences to the recorded run: of all requests each metric, of the largest groups E2E."""
    table = FigureTable(
        box=box.SIMPLE_HEAD,
        first_to_go=("slower", "faster", "recorded", "simulated"),
        caption="difference: simulated less recorded, mean of the requests that completed in both, with its 95 %"
        " interval over such traffic",
    )
    table.add_column("ms", justify="left", width=12, wraps_at=12)
    for name in ("pairs", "recorded", "simulated", "difference", "95 % interval", "faster", "slower"):
        table.add_column(name, width=len(name) + 1)
    counts: dict[str, int] = {}
    for one in differences:
        if one.group != "all":
            counts[one.group] = counts.get(one.group, 0) + (one.metric == _OF_GROUPS)
            if one.metric != _OF_GROUPS or counts[one.group] > _MOST_OF_A_GROUP:
                continue
        name = one.metric.upper() if one.group == "all" else f"E2E  {one.group} {one.name or _NAMELESS[one.group]}"
        if not one.num_pairs:
            table.add_row(Text(name), "0")
            continue
        interval = f"{one.low_ms:+,.1f} to {one.high_ms:+,.1f}" if one.low_ms == one.low_ms else "-"
        table.add_row(
            Text(name),
            f"{one.num_pairs:,}",
            f"{one.recorded_ms:,.1f}",
            f"{one.simulated_ms:,.1f}",
            f"{one.difference_ms:+,.1f}",
            interval,
            f"{one.faster_ratio:.0%}",
            f"{one.slower_ratio:.0%}",
        )
    console.print(table, highlight=False)
    left_out = [f"{count - _MOST_OF_A_GROUP:,} {group}s" for group, count in counts.items() if count > _MOST_OF_A_GROUP]
    if left_out:
        console.print(f"and {', '.join(left_out)} more: --out DIR writes all", style="dim", highlight=False)
