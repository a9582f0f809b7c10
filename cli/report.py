"""`lorrery report`: makes one HTML page of runs and sweeps."""

from pathlib import Path
from typing import Annotated

import typer

from lorrery.chassis.commands import Command, command_app
from lorrery.cli.version import VersionOption
from lorrery.reports.report import report as make_report

app = command_app()


@app.command(cls=Command)
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders that `load --out` and `simulate --out` have written."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The page. Unset: DIR/report.html; of several, report.html here."
        ),
    ] = None,
    version: VersionOption = False,
) -> None:
    """Make one HTML page of runs and sweeps: what ran, latencies, where time went, what was refused, what differs.

    The page is one file that needs no network and no script. Of several runs the first is what
    the others are compared with, and each difference comes with how sure it is.

    Examples:
      lorrery report out/azure
      lorrery report out/fcfs out/vtc_fair -o out/policies.html
      lorrery report out/sweep

    Exit code: 0 written, 1 a file cannot be read or written, 2 wrong usage.
    """
    del version
    typer.echo(f"report    {make_report(*folders, file=out)}")
