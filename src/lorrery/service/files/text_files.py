"""Text files, plain or gzip-compressed, told apart by their first bytes, so that this works for pipes too."""

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO, TextIO

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
