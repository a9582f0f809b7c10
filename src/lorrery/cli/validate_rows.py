"""Shared parts of the commands that compare a file's rows with predictions."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lorrery.service.errors import SettingsError
from lorrery.validation.figures import NotPredicted

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", dir_okay=False, help="Write each row's prediction, and the groups, to this file."
    ),
]


def group_names(group: Iterable[str] | None, usual: Sequence[str]) -> list[str]:
    """Return the columns that `--group` names, without duplicates.

    Args:
        group: as given, names with commas; None: not given.
        usual: the default.

    Raises:
        SettingsError: a name is empty.
    """
    names = [name.strip() for text in group or () for name in text.split(",")] or list(usual)
    if "" in names:
        raise SettingsError(f"--group {','.join(names)}: an empty name; write column names with commas between")
    return list(dict.fromkeys(names))


def say_left_out(left_out: Iterable[NotPredicted]) -> None:
    """Print how many rows have no prediction, and why."""
    for one in left_out:
        typer.echo(f"not predicted: {one.num_rows:,} rows, the first in line {one.line}: {one.why}")
