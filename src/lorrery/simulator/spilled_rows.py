"""Rows of integers that grow with a run: in memory while they are few, then in an unnamed file.

The file disappears with the process, however it ends. If none can be written, rows stay in memory. It is in the folder
named by `TMPDIR`, else in `/tmp`; if that is in memory (tmpfs), the file saves none: name a folder on a disk.
"""

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
import numpy.typing as npt

CHUNK_ROWS = 16_384
"""Rows per write and read."""
CHUNKS_IN_MEMORY = 1
"""Chunks kept before the first write; after it each chunk is written as it fills. Two of a simulation's are 5 MB."""


class SpilledRows:
    """Takes rows, and yields them in order any number of times.

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
        """Add a row."""
        self._open.extend(row)
        if len(self._open) == self._full:
            self._kept.append(self._open)
            self._open = array("q")
            if self._can_write and (self._num_written or len(self._kept) > CHUNKS_IN_MEMORY):
                self._write()

    def chunks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield all rows in order, in arrays of shape (rows, width) with at most `CHUNK_ROWS` rows each."""
        size = self._full * self._open.itemsize
        for number in range(self._num_written):
            assert self._file is not None
            yield np.frombuffer(os.pread(self._file.fileno(), size, number * size), np.int64).reshape(-1, self._width)
        for chunk in (*self._kept, self._open):
            yield np.array(chunk, np.int64).reshape(-1, self._width)

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="lorrery-", buffering=0)  # noqa: SIM115  # kept open
                weakref.finalize(self, self._file.close)
            while self._kept:
                content = memoryview(self._kept[0]).cast("B")
                at, written = self._num_written * len(content), 0
                while written < len(content):
                    written += os.pwrite(self._file.fileno(), content[written:], at + written)
                self._num_written += 1
                content.release()
                del self._kept[0]
        except OSError:  # no space, or no writable folder
            self._can_write = False


Column = npt.NDArray[Any]


class RowColumns:
    """Rows of integers that arrive one by one and are read as columns in the end, each of its own type.

    Until then they spill to a file once there are many: columns that grow side by side fragment a process's memory, by
    half of their size.

    Args:
        kinds: type of each column, in the order of a row.
    """

    def __init__(self, kinds: Mapping[str, type[np.int64] | type[np.int32]]) -> None:
        self._kinds = kinds
        self._rows = SpilledRows(len(kinds))
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def add(self, row: tuple[int, ...]) -> None:
        """Add a row."""
        self._rows.add(row)
        self._num_rows += 1

    def take(self, *, sort_by: str) -> dict[str, Column]:
        """Return all columns with rows sorted by one of them, and drop them; read-only where all rows are equal.

        Needs memory for one extra column; a column of equal values takes none.

        Raises:
            OverflowError: a value exceeds its column's type.
        """
        columns = {name: np.empty(self._num_rows, kind) for name, kind in self._kinds.items()}
        begin = 0
        for rows in self._rows.chunks():
            for (name, column), values in zip(columns.items(), rows.T, strict=True):
                part = column[begin : begin + len(rows)]
                part[:] = values
                if part.dtype != values.dtype and (part != values).any():
                    raise OverflowError(f"{name}: {values[part != values][0]} is beyond {part.dtype}")
            begin += len(rows)
        self._rows, self._num_rows = SpilledRows(len(self._kinds)), 0
        order = np.argsort(columns[sort_by], kind="stable")
        return {name: _in_order(columns.pop(name), order) for name in self._kinds}


def _in_order(column: Column, order: npt.NDArray[np.int64]) -> Column:
    if len(column) and (column == column[0]).all():
        return np.broadcast_to(column[:1].copy(), len(column))
    return column[order]
