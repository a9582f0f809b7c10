"""Files that are read again when they change, without a restart: keys, tokens, certificates.

There is no task and no timer: reading the value checks the files, at most once a second. If files are broken or
missing, the previous value stays, and each such change is logged once.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from lorrery.service.errors import SettingsError
from lorrery.service.telemetry.log import get_logger

LOOK_SECONDS = 1.0
"""Minimum time between two checks of the files."""

_T = TypeVar("_T")
_Stamp = tuple[int, int, int] | None


class Watched(Generic[_T]):
    """A value read from files, kept up to date.

    Args:
        paths: of the files.
        read: builds the value; raises `SettingsError` if it cannot.

    Raises:
        SettingsError: the files cannot be read now.
    """

    def __init__(self, paths: Iterable[Path], read: Callable[[], _T]) -> None:
        self._paths, self._read = tuple(paths), read
        self._stamps = self._look()
        self._value = read()
        self._looked = time.monotonic()

    def current(self) -> _T:
        """Return the value, at most a second old: the same object until it changes."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            found = self._look()
            if found != self._stamps:
                self._stamps = found
                self._read_again()
        return self._value

    def _look(self) -> list[_Stamp]:
        return [_stamp(path) for path in self._paths]

    def _read_again(self) -> None:
        log = get_logger("service.files.watched")
        paths = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except SettingsError as error:
            log.error("file_not_reread", path=paths, reason=str(error), in_force="what it said before")
        else:
            log.info("file_reread", path=paths)


def _stamp(path: Path) -> _Stamp:
    """Return a stamp that changes whenever a file is replaced or written; None: the file cannot be checked."""
    try:
        status = os.stat(path)  # noqa: PTH116  a third of the time of Path.stat
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
