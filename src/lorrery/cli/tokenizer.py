"""`lorrery tokenizer`: provides the shipped tokenizer as a folder, for clients that count tokens."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from lorrery.cli.flags import VersionOption
from lorrery.service.commands import Command, command_app
from lorrery.service.errors import LorreryError
from lorrery.tokenizer.file import SHIPPED

app = command_app()


@app.command(cls=Command)
def tokenizer(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to copy it to; must not exist. Default: print its path.")
    ] = None,
    version: VersionOption = False,
) -> None:
    """Print the path of the shipped tokenizer, or copy it: a folder that Hugging Face's libraries load offline.

    Pass it to clients that count tokens, such as a benchmark's --tokenizer. router.tokenizer selects another one.

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
        raise LorreryError(f"{folder} already exists; name a new folder") from None
    except OSError as error:
        raise LorreryError(f"{folder}: {error.strerror}") from None
    typer.echo(folder)
