"""`lorrery tokenizer`: provides the shipped tokenizer as a folder, for clients that count tokens."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from lorrery.chassis.commands import Command, command_app
from lorrery.chassis.errors import LorreryError
from lorrery.cli.version import VersionOption
from lorrery.tokenizer.file import SHIPPED

app = command_app()


@app.command(cls=Command)
def tokenizer(
    folder: Annotated[
        Path | None, typer.Argument(help="Copy it there; a folder that is not there yet. Default: say where it is.")
    ] = None,
    version: VersionOption = False,
) -> None:
    """Say where the shipped tokenizer is, or copy it: a folder as Hugging Face's libraries load it, without a network.

    Give it to a client that counts tokens, such as a benchmark's --tokenizer. router.tokenizer names another one.

    Examples:
      lorrery tokenizer
      lorrery tokenizer ./lorrery-tokenizer
      lorrery up --set router.tokenizer=./lorrery-tokenizer
    """
    del version
    if folder is None:
        typer.echo(SHIPPED)
        return
    try:
        shutil.copytree(SHIPPED, folder)
    except FileExistsError:
        raise LorreryError(f"{folder} is there already; name a new folder") from None
    except OSError as error:
        raise LorreryError(f"{folder}: {error.strerror}") from None
    typer.echo(folder)
