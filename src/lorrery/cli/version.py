"""The `--version` option of subcommands."""

from typing import Annotated

import typer

from lorrery.service.installed import VERSION


def _print(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(f"{context.info_name} {VERSION}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print, is_eager=True, help="Print the version and exit.")
]
"""Type of a parameter `version`, which the command itself can ignore."""
