"""Opens text files and CSV files for reading.

Compressed ones are told apart by their first bytes, so that this works for pipes too; an error of a CSV file is one
line that begins with the path.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from lorrery.service.errors import LorreryError

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
