"""Bytes of a trace that may be too many for memory: in memory while they are few, then in an unnamed file.

Block ids are most of a trace of prefixes, and texts most of a file of conversations, while a run reads one request
after another. The file disappears with the process, however it ends. If none can be written, the bytes stay in memory.
It is in the folder named by `TMPDIR`, else in `/tmp`; if that is in memory (tmpfs), the file saves none: name a folder
on a disk.
"""

import os
import tempfile
import weakref
from typing import IO, Final

MEMORY_BYTES: Final = 1 << 25
"""Kept before a write."""


class FileSpool:
    """See `workload.spool.Spool`."""

    def __init__(self) -> None:
        self._open = bytearray()
        self._num_written = 0
        self._file: IO[bytes] | None = None
        self._can_write = True

    def add(self, piece: bytes) -> int:
        """See `Spool`."""
        place = self._num_written + len(self._open)
        self._open += piece
        if self._can_write and len(self._open) >= MEMORY_BYTES:
            self._write()
        return place

    def read(self, place: int, size: int) -> bytes:
        """See `Spool`."""
        at = place - self._num_written
        if at >= 0:
            return bytes(self._open[at : at + size])
        assert self._file is not None
        return os.pread(self._file.fileno(), size, place)

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="lorrery-", buffering=0)  # noqa: SIM115  # kept open
                weakref.finalize(self, self._file.close)
            written = 0
            with memoryview(self._open) as content:
                while written < len(content):
                    written += os.pwrite(self._file.fileno(), content[written:], self._num_written + written)
            self._num_written += written
            self._open = bytearray()
        except OSError:  # no space, or no writable folder
            self._can_write = False
