"""Writes files atomically, and makes temporary folders that are cleaned up even if their process is killed.

A reader sees the old file or the new one, never a part. The content goes to a new file beside the old one, which is
then replaced. Exceptions: a symbolic link stays, and its target is replaced; anything but a regular file (a device, a
named pipe) is written to directly. So is a file that the process has open (`/dev/stdout`, `/dev/fd/3`), at its current
position.

Each temporary folder holds a file that its process has locked. The system releases the lock however the process ends,
so the next caller removes folders whose lock is free. Process ids would not do, since they are reused. A folder without
the file belongs to another program, or is being created, and is left alone.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lorrery.service.errors import LorreryError, SettingsError

_DESCRIPTORS = re.compile(r"(/proc/[^/]+(/task/[^/]+)?|/dev)/fd")
"""Folders of a process's open descriptors; /proc/self is a link."""
_MOST_LINKS = 40
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write when the disk, the user's quota, or the file is full."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it is in place once the block ends, and not at all if the block fails.

    Raises:
        OSError: it cannot be written; if there is no room, the error also names the file.
    """
    try:
        with _opened(path) as file:
            yield file
    except OSError as error:
        if error.errno in NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if (number := _descriptor(path)) is not None:
        with os.fdopen(os.dup(number), "wb") as file:
            yield file
        return
    try:
        replaceable = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:  # also for a dangling link: its target is created
        replaceable = True
    if not replaceable:
        with path.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    # The same file may be written concurrently, on other machines too.
    partial = target.with_name(f".{target.name}.{os.urandom(8).hex()}")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that a path refers to, directly or through links; None: a plain path."""
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        if _DESCRIPTORS.fullmatch(folder):
            own = os.path.realpath("/proc/self/fd")
            return int(path.name) if path.name.isdecimal() and folder in (own, "/dev/fd") else None
        if not path.is_symlink():
            return None
        path = Path(folder, path.readlink())
    return None


def check_writable(what: str, path: Path) -> None:
    """Check, before the content is made, that `whole_file` can write a file; creates nothing.

    Args:
        what: names the file in the message: an option or an argument.
        path: of the file.

    Raises:
        SettingsError: the path is a folder, or its folder does not exist or cannot be written to.
    """
    target = Path(os.path.realpath(path))
    try:
        if _descriptor(path) is not None:
            return
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = stat.S_IFREG
    except OSError as error:  # a name that no file can have
        raise SettingsError(f"{what} {path}: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        why = "that is a folder"
    elif not stat.S_ISREG(mode):
        why = "" if os.access(target, os.W_OK) else "that cannot be written to"
    elif not target.parent.is_dir():
        why = f"that is in {target.parent}, which is no folder"
    else:
        why = "" if os.access(target.parent, os.W_OK | os.X_OK) else f"{target.parent} cannot be written to"
    if why:
        raise SettingsError(f"{what} {path}: {why}; name a file in an existing folder")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file's content as `whole_file` does.

    Raises:
        OSError: it cannot be written.
    """
    with whole_file(path) as file:
        file.write(content)


def write_output(path: Path, text: str) -> None:
    """Write a text file that a command was asked for, as `whole_file` does.

    Raises:
        LorreryError: the file cannot be written; the message says why.
    """
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None


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
