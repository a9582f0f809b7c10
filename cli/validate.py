"""`lorrery validate`: holds the shipped code against what other programs did.

`golden` replays golden records (JSON Lines, see `cli/golden`). Its last line is `N passed, N failed, N skipped` and
nothing else, for scripts to read.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from cli.golden.replay import Failure, FileReport, KindReport, Report, replay_files
from cli.version import VersionOption

MAX_FAILURES_SHOWN = 5
"""Failed records shown per kind and file."""
MAX_MISMATCHES_SHOWN = 3
"""Differences shown per failed record."""
MAX_VALUE_LENGTH = 300
"""Characters of a value shown."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def validate(version: VersionOption = False) -> None:
    """Hold the shipped code against results of the programs it models."""
    del version


@app.command()
def golden(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", exists=True, dir_okay=False, help="JSON Lines.")],
) -> None:
    """Replay golden records through the shipped code.

    Each line of a FILE is one case: inputs, and what the original program made of them. What a line is about is told by
    its fields, not by the file's name, so files may be renamed, cut and mixed.

    Prints per file and kind how many cases are reproduced, shows the first ones that are not, and closes with
    "N passed, N failed, N skipped". Exits with 1 if anything failed, nothing passed, a file has no cases, or a case is
    about a part that does not exist yet.
    """
    report = replay_files(files)
    for line in render(report):
        typer.echo(line)
    if not report.ok:
        raise typer.Exit(1)


def render(report: Report) -> list[str]:
    """Write a report as lines of text; the last one is `N passed, N failed, N skipped`."""
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
    """Write each reason for skips once, with the kind and the number of records."""
    reasons: dict[tuple[str, str], int] = {}
    for file in report.files:
        for kind in file.kinds.values():
            for reason in kind.skip_reasons:
                reasons[kind.kind, reason] = reasons.get((kind.kind, reason), 0) + 1
    return [f"skipped {count} of {kind}: {reason}" for (kind, reason), count in reasons.items()]


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}... ({len(text)} characters)"
