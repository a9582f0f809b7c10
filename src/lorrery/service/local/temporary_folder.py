"""Folders in the system's temporary directory that live as long as a process, and are cleaned up even if it is killed.

Each holds a file that its process has locked. The system releases the lock however the process ends, so the next caller
removes folders whose lock is free. Process ids would not do, since they are reused. A folder without the file belongs
to another program, or is being created, and is left alone.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lorrery.service.errors import LorreryError

__all__ = ["temporary_folder"]

_PREFIX = "lorrery-"
_LOCK = ".lock"


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Create a folder, and remove it at the end; first remove the folders left by killed processes.

    Args:
        purpose: part of its name.

    Raises:
        LorreryError: it cannot be created.
    """
    try:
        _clean(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-"))
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        cure = "let TMPDIR name a folder that can be written to"
        raise LorreryError(f"no folder for temporary files: {where}{error.strerror}; {cure}") from None
    try:
        new = folder / f"{_LOCK}.new"
        with new.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(folder / _LOCK)  # so the final name never exists without the lock
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clean(parent: Path) -> None:
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(parent)):
            if not entry.name.startswith(_PREFIX):
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    _remove_if_left(Path(entry.path))


def _remove_if_left(folder: Path) -> None:
    """Remove a folder whose process is gone.

    Raises:
        OSError: it has no lock file, or its process holds the lock.
    """
    with (folder / _LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
