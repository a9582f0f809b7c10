"""Reads TOML files: those shipped with a package, and those named by the settings.

The meaning of the tables is defined by the reader; the pure rooms build their records from them.
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
    """Return (file name, table) for each TOML file in the package's folder `data`, by name, then for the extra files.

    Tables are shared between callers; do not modify their values.

    Raises:
        SettingsError: an extra file cannot be read or is not TOML; the message names it.
    """
    tables = [(name, dict(table)) for name, table in _shipped(package)]
    return tables + [(str(path), read_toml(path)) for path in extra]


@cache
def _shipped(package: str) -> list[tuple[str, Table]]:
    folder = files(package) / "data"
    found = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return [(file.name, tomllib.loads(file.read_text(encoding="utf-8"))) for file in found]
