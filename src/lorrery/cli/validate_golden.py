"""`lorrery validate golden`: replays golden records (see `validation/golden`): shipped, given, or recorded just now.

Its last line is exactly `N passed, N failed, N skipped`, for scripts to read.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from lorrery.service.errors import SettingsError
from lorrery.service.files.shipped import golden_excerpts
from lorrery.service.files.writing import check_writable, write_output
from lorrery.validation.golden.replay import (
    RULES_OF,
    Case,
    Failure,
    FileReport,
    KindReport,
    Report,
    changed,
    interpreter,
    read_cases,
    record,
    replay_files,
)
from lorrery.validation.golden.vllm_cases import cases as vllm_cases

MAX_FAILURES_SHOWN = 5
"""Failed records shown per kind and file."""
MAX_MISMATCHES_SHOWN = 3
"""Differences shown per failed record."""
MAX_CHANGED_SHOWN = 5
"""Cases named that a vLLM decides otherwise than one before it."""
DEFAULT_CASES = 100
"""Cases that --against records: five of each family, in half a minute and vLLM's start."""
MAX_VALUE_LENGTH = 300
"""Characters of a value shown."""


def golden(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...", exists=True, dir_okay=False, help="JSON Lines; default: the shipped excerpts."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Record new cases from the vLLM in DIR/env, a virtual environment, and replay those.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the new cases; the same seed draws the same ones. Default: 0.")
    ] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="Number of new cases. Default: 100.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Keep the recorded cases in this file.")
    ] = None,
) -> None:
    """Replay golden records through the shipped code.

    Each line of a FILE is one case: inputs, and the original program's result. The kind of a case follows from its
    fields, not from the file's name, so files may be renamed, cut and mixed.

    With --against, vLLM's own scheduler decides new cases, without a model or a GPU, and these are replayed. With FILEs
    of such records too, their inputs are recorded again instead, and the cases that this vLLM decides otherwise are
    named. docs/engines.md says how to install the next vLLM.

    Prints the number of reproduced cases per file and kind, shows the first that are not, and ends with
    "N passed, N failed, N skipped". Exits with 1 if anything failed, nothing passed, a file has no cases, or a case is
    for a part that does not exist yet.

    Examples:
      lorrery validate golden
      lorrery validate golden my-records.jsonl
      lorrery validate golden --against ~/vllm --seed 7 --out records.jsonl
    """
    if against is None:
        for option, value in (("--seed", seed), ("--cases", cases), ("--out", out)):
            if value is not None:
                raise SettingsError(f"{option} {value}: only with --against DIR, which records cases")
        _report(replay_files(files or golden_excerpts()))
        return
    for option, value in (("--seed", seed), ("--cases", cases)):
        if files and value is not None:
            raise SettingsError(f"{option} {value}: with FILEs their cases are recorded, not new ones; leave out one")
    if out is not None:
        check_writable("--out", out)
    python = interpreter(against)
    chosen = read_cases(files) if files else list(vllm_cases(seed or 0, cases or DEFAULT_CASES))
    console = Console(stderr=True)
    recorded = list(track(record(python, chosen), "recording", len(chosen), console=console, transient=True))
    for line in _recorded_lines(against, chosen, recorded, fresh=not files, kept=out is not None):
        typer.echo(line)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        for file in filter(None, (out, path)):
            write_output(file, "".join(recorded))
        _report(replay_files([out if out is not None and out.is_file() else path]))  # a pipe is not read back


def _recorded_lines(folder: Path, cases: list[Case], recorded: list[str], *, fresh: bool, kept: bool) -> Iterator[str]:
    """Yield what was recorded from which vLLM, and how that differs from earlier records of the same inputs."""
    version = json.loads(recorded[0])["version"] if recorded else "?"
    yield f"vLLM {version} in {folder}: {len(recorded)} cases recorded" + ("" if kept else "; --out FILE keeps them")
    if version != RULES_OF:
        yield f"Lorrery's rules are those of vLLM {RULES_OF}; differences may be what has changed since"
    if not fresh:
        others = changed(cases, recorded)
        shown = ", ".join(others[:MAX_CHANGED_SHOWN]) + (", ..." if len(others) > MAX_CHANGED_SHOWN else "")
        yield f"{len(cases) - len(others)} of them as recorded before" + (f"; not {shown}" if others else "")


def _report(report: Report) -> None:
    for line in render(report):
        typer.echo(line)
    if not report.ok:
        raise typer.Exit(1)


def render(report: Report) -> list[str]:
    """Return a report as lines of text; the last one is `N passed, N failed, N skipped`."""
    lines: list[str] = []
    for file in report.files:
        lines += _render_file(file)
    lines += _render_skips(report)
    lines += [f"no records in {path}" for path in report.empty]
    lines.append(f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped")
    return lines


def _render_file(file: FileReport) -> list[str]:
    lines = [str(file.path)]
    for kind in file.kinds.values():
        counts = {"passed": kind.passed, "failed": len(kind.failures), "skipped": len(kind.skip_reasons)}
        lines.append(f"  {kind.kind}: " + ", ".join(f"{count} {what}" for what, count in counts.items() if count))
        lines += _render_failures(kind)
    return lines


def _render_failures(kind: KindReport) -> list[str]:
    lines: list[str] = []
    for failure in kind.failures[:MAX_FAILURES_SHOWN]:
        lines += _render_failure(failure)
    if (more := len(kind.failures) - MAX_FAILURES_SHOWN) > 0:
        lines.append(f"    and {more} more failed")
    return lines


def _render_failure(failure: Failure) -> list[str]:
    if failure.error is not None:
        return [f"    {failure.case}: {failure.error}"]
    lines: list[str] = []
    for mismatch in failure.mismatches[:MAX_MISMATCHES_SHOWN]:
        lines += [
            f"    {failure.case} (line {failure.line}): {mismatch.where}",
            f"      expected {_show(mismatch.expected)}",
            f"      got      {_show(mismatch.got)}",
        ]
    if (more := len(failure.mismatches) - MAX_MISMATCHES_SHOWN) > 0:
        lines.append(f"    {failure.case} (line {failure.line}): and {more} more differences")
    return lines


def _render_skips(report: Report) -> list[str]:
    """Return each reason for skips once, with the kind and the number of records."""
    reasons: dict[tuple[str, str], int] = {}
    for file in report.files:
        for kind in file.kinds.values():
            for reason in kind.skip_reasons:
                reasons[kind.kind, reason] = reasons.get((kind.kind, reason), 0) + 1
    return [f"skipped {count} of {kind}: {reason}" for (kind, reason), count in reasons.items()]


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}... ({len(text)} characters)"
