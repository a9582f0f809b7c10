"""Writes the output files of commands."""

from pathlib import Path

from lorrery.service.errors import LorreryError
from lorrery.service.files.writing import write_whole


def write(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        LorreryError: the file cannot be written; the message says why.
    """
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None
