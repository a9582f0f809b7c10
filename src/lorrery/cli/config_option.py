"""The `--config` option of commands that act on a whole cluster."""

from pathlib import Path
from typing import Annotated

import typer

CONFIG_HELP = "Settings file; default: $LORRERY_CONFIG, else the shipped one, which lorrery init copies."

ConfigOption = Annotated[
    Path,
    typer.Option(
        metavar="FILE", envvar="LORRERY_CONFIG", show_envvar=False, show_default=False, help=CONFIG_HELP, dir_okay=False
    ),
]
"""Type of a parameter `config`; its default is `DEFAULT_SETTINGS`."""
