"""Rows of whole numbers that grow with a run: in memory while they are few, then in a file without a name.

Such a file is gone with the process, however it ends. Where none can be written, rows stay in memory. It is in the
folder that `TMPDIR` names, else in `/tmp`; where that is memory itself (tmpfs), a file saves none: name one on a disk.
"""

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator
from typing import IO

import numpy as np
import numpy.typing as npt

CHUNK_ROWS = 16_384
"""Rows that are written and read at once."""
CHUNKS_IN_MEMORY = 1
"""Before anything is written; then each chunk is written as it fills. At most two of a simulation's rows are 5 MB."""


class SpilledRows:
    """Takes rows, and gives them back in order as often as they are asked for.

    Args:
        width: numbers in a row, of 8 bytes each.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._full = width * CHUNK_ROWS
        self._open = array("q")
        self._kept: list[array[int]] = []
        self._file: IO[bytes] | None = None
        self._num_written = 0
        self._can_write = True

    def add(self, row: tuple[int, ...]) -> None:
        """Take a row."""
        self._open.extend(row)
        if len(self._open) == self._full:
            self._kept.append(self._open)
            self._open = array("q")
            if self._can_write and (self._num_written or len(self._kept) > CHUNKS_IN_MEMORY):
                self._write()

    def chunks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield all rows in order, in arrays of shape (rows, width), `CHUNK_ROWS` at most each."""
        size = self._full * self._open.itemsize
        for number in range(self._num_written):
            assert self._file is not None
            yield np.frombuffer(os.pread(self._file.fileno(), size, number * size), np.int64).reshape(-1, self._width)
        for chunk in (*self._kept, self._open):
            yield np.array(chunk, np.int64).reshape(-1, self._width)

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="lorrery-", buffering=0)  # noqa: SIM115  # open while this is
                weakref.finalize(self, self._file.close)
            while self._kept:
                content = memoryview(self._kept[0]).cast("B")
                at, written = self._num_written * len(content), 0
                while written < len(content):
                    written += os.pwrite(self._file.fileno(), content[written:], at + written)
                self._num_written += 1
                content.release()
                del self._kept[0]
        except OSError:  # no room, or nowhere to write
            self._can_write = False
