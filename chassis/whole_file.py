"""Writes files that appear as a whole: a reader sees the old file or the new one, never half of it.

The content goes to a new file beside the old one, which then takes its place. Where that would destroy something it
does not: a symbolic link stays, and its target is replaced; what is no regular file (a device, a named pipe) is written
to as it is. So is a file that the process has open (`/dev/stdout`, `/dev/fd/3`): at the place where it stands there.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_DESCRIPTORS = re.compile(r"(/proc/[^/]+(/task/[^/]+)?|/dev)/fd")
"""Folders of the descriptors that a process has open; /proc/self is a link."""
_MOST_LINKS = 40
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write ends in when the disk, the user's share of it, or the file is full."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write; it is in place once the block ends, and not at all if the block fails.

    Raises:
        OSError: it cannot be written; where there is no room, that names the file too.
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
    except FileNotFoundError:  # a link to nothing too: its target is made
        replaceable = True
    if not replaceable:
        with path.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    # Others may write the same file now, on other machines too.
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
    """Return the descriptor of this process that a path stands for, itself or over links; None: it is a file's."""
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        if _DESCRIPTORS.fullmatch(folder):
            own = os.path.realpath("/proc/self/fd")
            return int(path.name) if path.name.isdecimal() and folder in (own, "/dev/fd") else None
        if not path.is_symlink():
            return None
        path = Path(folder, path.readlink())
    return None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file's content as `whole_file` does.

    Raises:
        OSError: it cannot be written.
    """
    with whole_file(path) as file:
        file.write(content)
