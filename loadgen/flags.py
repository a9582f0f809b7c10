"""The options that `lorrery load` and `lorrery simulate` share on the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lorrery.loadgen.options import OPTIONS, LoadOptions
from lorrery.service.commands import command_options, takes
from lorrery.service.errors import SettingsError

_OUTPUT = "Output"

_F = TypeVar("_F", bound=Callable[..., Any])

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write summary.json, requests.csv and report.html to this folder.", rich_help_panel=_OUTPUT
    ),
]
Report = Annotated[
    bool,
    typer.Option(
        " /--no-report",
        show_default=False,  # by default there is a report
        help="With --out: do not write report.html.",
        rich_help_panel=_OUTPUT,
    ),
]


def check_report(out: Path | None, *, report: bool) -> None:
    """Check that `--no-report` is given only together with a folder.

    Raises:
        SettingsError: `--no-report` without a folder.
    """
    if out is None and not report:
        raise SettingsError("--no-report goes with --out DIR only: without it no report.html is written; leave it out")


def takes_load_options(*, before: str, live: bool) -> Callable[[_F], _F]:
    """Return a decorator that gives a command of `**given` the options of `loadgen.options`.

    Args:
        before: the command's parameter that they precede.
        live: include options of a live target.
    """
    names = [name for name, option in OPTIONS.items() if live or not option.live_only]
    return takes(command_options(LoadOptions, names), before=before)
