"""`lorrery report`: makes one HTML page of runs and sweeps."""

from pathlib import Path
from typing import Annotated

import typer

from lorrery.cli.flags import VersionOption
from lorrery.service.commands import Command, command_app
from lorrery.view.reports.report import report as make_report

app = command_app()


@app.command(cls=Command)
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders written by `load --out` and `simulate --out`."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File to write. Unset: DIR/report.html; for several folders, report.html in the current one.",
        ),
    ] = None,
    version: VersionOption = False,
) -> None:
    """Write an HTML report of runs and sweeps: what ran, latencies, where time went, what was refused, what differs.

    The report is one file that needs no network and no scripts. Several runs are compared with the
    first one, and each difference is given with its uncertainty.

    Examples:
      lorrery report out/azure
      lorrery report out/fcfs out/vtc_fair -o out/policies.html
      lorrery report out/sweep

    Exit code: 0 written, 1 a file cannot be read or written, 2 wrong usage.
    """
    del version
    typer.echo(f"report    {make_report(*folders, file=out)}")
