"""Reads TOML files: those that ship with a package, and those that the settings name.

What the tables mean is the reader's business; the pure rooms build their records from them.
"""

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lorrery.chassis.toml import read_toml

Table = dict[str, Any]


def read_tables(package: str, extra: Iterable[Path] = ()) -> list[tuple[str, Table]]:
    """Return (file name, table) of each TOML file in the package's folder `data`, by name, then of the extra ones.

    What is in a table is shared by all who ask: leave it as it is.

    Raises:
        SettingsError: an extra file that cannot be read or is no TOML; the message names it.
    """
    tables = [(name, dict(table)) for name, table in _shipped(package)]
    return tables + [(str(path), read_toml(path)) for path in extra]


@cache
def _shipped(package: str) -> list[tuple[str, Table]]:
    folder = files(package) / "data"
    found = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return [(file.name, tomllib.loads(file.read_text(encoding="utf-8"))) for file in found]
