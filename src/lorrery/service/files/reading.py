"""Opens text files and CSV files for reading, and reads and writes tables as TOML.

Compressed files are told apart by their first bytes, so that this works for pipes too; an error of a CSV file is one
line that begins with the path.

TOML is read from text, files and the `data` folders of packages. The meaning of the tables is defined by the reader;
the pure rooms build their records from them.
"""

import csv
import gzip
import io
import json
import math
import re
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from lorrery.service.errors import LorreryError, SettingsError

GZIP = b"\x1f\x8b"
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""Errors when reading truncated or damaged compressed data; `gzip.BadGzipFile` is an OSError too."""


def open_text(path: Path, encoding: str = "utf-8") -> TextIO:
    """Open a file for reading, with line ends unchanged.

    Raises:
        OSError: it cannot be opened. Reading may raise UnicodeDecodeError, and the errors in `DAMAGED`.
    """
    file = path.open("rb")
    try:
        if file.peek(len(GZIP))[: len(GZIP)] == GZIP:
            return io.TextIOWrapper(_Gzip(file), encoding=encoding, newline="")
    except BaseException:
        file.close()
        raise
    return io.TextIOWrapper(file, encoding=encoding, newline="")


class _Gzip(gzip.GzipFile):
    """The content of a compressed file, which is closed with it."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


def damage(path: Path, error: BaseException) -> str:
    """Return the message for an error of `DAMAGED`."""
    return f"{path}: cut or damaged gzip ({error}); get it again"


@contextmanager
def open_csv(path: Path, refusal: type[LorreryError], row_error: type[Exception]) -> Iterator[TextIO]:
    """Open a CSV file for reading.

    Args:
        path: the file; UTF-8, with or without a byte-order mark.
        refusal: class of the error to raise; its message names the file.
        row_error: raised in the body for a bad row or header; its message names the line.

    Raises:
        refusal: the file cannot be read, is not text or CSV, or has an invalid row.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise refusal(f"{path}: no UTF-8 text ({error.reason}); a CSV file is needed") from None
    except OSError as error:
        raise refusal(f"{path}: {error.strerror or error}") from None
    except csv.Error as error:
        raise refusal(f"{path}: no CSV ({error}); save it as CSV with commas and a header") from None
    except row_error as error:
        raise refusal(f"{path}: {error}") from None


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
