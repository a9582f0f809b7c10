"""`lorrery init`: writes a copy of the shipped settings file for editing."""

from pathlib import Path
from typing import Annotated

import typer

from lorrery.cli.flags import VersionOption
from lorrery.service.commands import Command, command_app
from lorrery.service.errors import LorreryError
from lorrery.service.files.shipped import DEFAULT_SETTINGS

FILE = "cluster.toml"
HEADER = """\
# Your cluster: GPU and model, limits, policy, adapters.
#
# Commands read this file when they get it as --config FILE, or when LORRERY_CONFIG names it. Every key can also be set
# by the environment (LORRERY_SCHEDULER__RUNNING_MAX_REQ_SIZE=64) and on the command line (--set
# scheduler.running_max_req_size=64); the command line wins. A key that is not listed here has its default. Durations
# are in seconds.
"""

app = command_app()


@app.command(cls=Command)
def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to write to.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    version: VersionOption = False,
) -> None:
    """Write cluster.toml, a settings file to edit.

    It contains the settings that every command uses without --config.

    Examples:
      lorrery init
      lorrery init clusters/a100
    """
    del version
    path = folder / FILE
    _, _, settings = DEFAULT_SETTINGS.read_text(encoding="utf-8").partition("\n\n")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(f"{HEADER}\n{settings}")
    except FileExistsError:
        if not folder.is_dir():
            raise LorreryError(f"{folder} is a file; name the folder that {FILE} goes to") from None
        raise LorreryError(f"{path} already exists; --force overwrites it") from None
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None
    typer.echo(f"wrote {path}; try\n\n  lorrery up --config {path}\n")
