"""The settings behind the flags, as a settings file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorrery.cli.serve.settings import Engine
from lorrery.settings import Settings
from lorrery.settings.cluster import FORMAT

_NO_KEYS = "# --api-key: router.keys is a file with the keys' SHA-256, see lorrery keys new --help.\n"


def settings_file(engine: Engine) -> str:
    """Return a settings file that `lorrery up --config FILE` runs as `lorrery serve` does."""
    workers = f" --workers {engine.num_workers}"
    head = f"# What the flags amount to; run it with lorrery up{workers} --config FILE.\n"
    if engine.api_keys:
        head += _NO_KEYS
    tables = {"format": FORMAT, **_unlike(engine.settings.model_dump(), Settings.model_validate({}).model_dump())}
    return f"{head}\n" + "".join(f"{line}\n" for line in _lines(tables, ""))


def _unlike(tables: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from its default."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(key), Mapping):
            if inner := _unlike(value, defaults[key]):
                found[key] = inner
        elif value != defaults.get(key):
            found[key] = value
    return found


def _lines(tables: Mapping[str, Any], name: str) -> list[str]:
    """Return the lines of a table and of those in it: plain values first, as TOML needs it."""
    nested = {key: value for key, value in tables.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {_value(value)}" for key, value in tables.items() if key not in nested and value is not None]
    if name and lines:
        lines = ["", f"[{name}]", *lines]
    for key, value in nested.items():
        lines += _lines(value, f"{name}.{key}" if name else key)
    return lines


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items() if one is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    # A basic string of TOML is JSON's, but for the one character that JSON leaves as it is.
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False).replace("\x7f", "\\u007f")
