"""A file that is read again when it changes, without a restart: keys, tokens, certificates.

There is no task and no timer: who asks for the value looks at the file, at most once a second. A file that is broken or
gone keeps what was read before, and the log says so, once for each change.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.log import get_logger

LOOK_SECONDS = 1.0
"""Least time between two looks at a file."""

_T = TypeVar("_T")
Stamp = tuple[int, int, int] | None


def stamp(path: Path) -> Stamp:
    """Return what changes whenever a file is replaced or written; None: it cannot be looked at."""
    try:
        status = os.stat(path)  # noqa: PTH116  a third of the time of Path.stat
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


class WatchedFile(Generic[_T]):
    """What a file says now.

    Args:
        path: of the file.
        read: makes the value of it; raises `SettingsError` where it cannot.

    Raises:
        SettingsError: it cannot be read now.
    """

    def __init__(self, path: Path, read: Callable[[Path], _T]) -> None:
        self._path, self._read = path, read
        self._stamp = stamp(path)
        self._value = read(path)
        self._looked = time.monotonic()

    def current(self) -> _T:
        """Return the value; at most a second old."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            found = stamp(self._path)
            if found != self._stamp:
                self._stamp = found
                self._read_again()
        return self._value

    def _read_again(self) -> None:
        log = get_logger("chassis.watched")
        try:
            self._value = self._read(self._path)
        except SettingsError as error:
            log.error("file_not_reread", path=str(self._path), reason=str(error), in_force="what it said before")
        else:
            log.info("file_reread", path=str(self._path))
