"""Writes the files that commands are asked for."""

from pathlib import Path

from lorrery.chassis.errors import LorreryError


def write(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        LorreryError: the file cannot be written; the message says why.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None
