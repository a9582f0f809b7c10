"""Tables as TOML: read from text, files and the `data` folders of packages, and written.

The meaning of the tables is defined by the reader; the pure rooms build their records from them.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lorrery.service.errors import SettingsError

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_MAX_PARTS = 100  # the parser's time grows with the square of a key's parts
_PART = rf"""(?:{_BARE.pattern}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
# Keys are at the start of a line, in brackets or braces, or after a comma.
_LONG_KEY = re.compile(rf"(?m:^|[\[{{,])[ \t]*{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{_MAX_PARTS},}}[ \t]*[=\]]")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse tables.

    Raises:
        tomllib.TOMLDecodeError: not TOML; says where.
        ValueError: it exceeds the depth, digits or key length that Python's parser can handle.
    """
    if _LONG_KEY.search(text):
        raise ValueError(f"it has a key of more than {_MAX_PARTS} parts; give a shorter one")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply; give fewer levels") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise ValueError("it has a number of too many digits; give a shorter one") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file's tables.

    Raises:
        SettingsError: it cannot be read, or is not TOML; names the file.
    """
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{path}: byte {error.object[error.start]:#04x} at {error.start} is no UTF-8; save it as UTF-8 text"
        ) from None
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None


def read_tables(package: str, extra: Iterable[Path] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, table) for each TOML file in the package's folder `data`, by name, then for the extra files.

    Tables are shared between callers; do not modify their values.

    Raises:
        SettingsError: an extra file cannot be read or is not TOML; the message names it.
    """
    tables = [(name, dict(table)) for name, table in _shipped(package)]
    return tables + [(str(path), read_toml(path)) for path in extra]


@cache
def _shipped(package: str) -> list[tuple[str, dict[str, Any]]]:
    folder = files(package) / "data"
    found = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return [(file.name, tomllib.loads(file.read_text(encoding="utf-8"))) for file in found]


def to_toml(tables: Mapping[str, Any]) -> str:
    """Return tables as TOML; values that are None are left out."""
    return "".join(f"{line}\n" for line in _lines(tables, ""))


def _lines(tables: Mapping[str, Any], name: str) -> list[str]:
    """Return the lines of a table and its subtables: plain values first, as TOML requires."""
    nested = {key: value for key, value in tables.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in tables.items() if key not in nested and value is not None}
    lines = [f"{_key(key)} = {to_value(value)}" for key, value in plain.items()]
    if name and (lines or not tables):
        lines = ["", f"[{name}]", *lines]
    for key, value in nested.items():
        lines += _lines(value, f"{name}.{_key(key)}" if name else _key(key))
    return lines


def dotted(key: Iterable[str]) -> str:
    """Return the dotted key of a value in tables, such as `a.b."c.d"`."""
    return ".".join(map(_key, key))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def to_value(value: object) -> str:
    """Return one value as TOML, on one line."""
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
    # Dates and times from a file; services may not import datetime, because it reads the time of day.
    if (isoformat := getattr(value, "isoformat", None)) is not None:
        return str(isoformat())
    raise TypeError(f"{value!r} has no form in TOML")


def _string(text: str) -> str:
    # TOML's basic strings are JSON's, except for the one character that JSON does not escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
