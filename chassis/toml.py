"""Tables written as TOML."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(tables: Mapping[str, Any]) -> str:
    """Write tables; values that are None are left out."""
    return "".join(f"{line}\n" for line in _lines(tables, ""))


def _lines(tables: Mapping[str, Any], name: str) -> list[str]:
    """Return the lines of a table and of those in it: plain values first, as TOML needs it."""
    nested = {key: value for key, value in tables.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in tables.items() if key not in nested and value is not None}
    lines = [f"{_key(key)} = {to_value(value)}" for key, value in plain.items()]
    if name and (lines or not tables):
        lines = ["", f"[{name}]", *lines]
    for key, value in nested.items():
        lines += _lines(value, f"{name}.{_key(key)}" if name else _key(key))
    return lines


def dotted(key: Iterable[str]) -> str:
    """Write the key of a value in tables, such as `a.b."c.d"`."""
    return ".".join(map(_key, key))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def to_value(value: object) -> str:
    """Write one value, on one line."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {to_value(one)}" for key, one in value.items() if one is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf, nan
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Path):
        return _string(str(value))
    if isinstance(value, str):
        return _string(value)
    # Dates and times as a file has them; services may not import datetime, for it reads the time of day.
    if (isoformat := getattr(value, "isoformat", None)) is not None:
        return str(isoformat())
    raise TypeError(f"{value!r} has no form in TOML")


def _string(text: str) -> str:
    # A basic string of TOML is JSON's, but for the one character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
