"""Rows of whole numbers that come one by one, kept as columns, each of a type of its own.

A column is one array that grows in its place. Many small ones would leave holes where they were, which the process
keeps.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK_ROWS = 16_384
"""Rows that are laid out at once."""

Column = npt.NDArray[Any]


class RowColumns:
    """Takes rows, and gives columns.

    Args:
        kinds: type of each column, in the order of a row.
    """

    def __init__(self, kinds: Mapping[str, type[np.int64] | type[np.int32]]) -> None:
        self._kinds = kinds
        self._full = len(kinds) * CHUNK_ROWS
        self._open = array("q")
        self._columns = {name: array("i" if kind is np.int32 else "q") for name, kind in kinds.items()}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()))) + len(self._open) // len(self._kinds)

    def add(self, row: tuple[int, ...]) -> None:
        """Take a row."""
        self._open.extend(row)
        if len(self._open) == self._full:
            self._lay_out()

    def take(self, *, sort_by: str) -> dict[str, Column]:
        """Return all columns, the rows in order of one of them, and forget them; read-only where all rows are alike.

        Takes memory for one column more; such a column takes none.
        """
        self._lay_out()
        columns, self._columns = self._columns, {name: array(one.typecode) for name, one in self._columns.items()}
        order = np.argsort(np.array(columns[sort_by], np.int64), kind="stable")
        return {name: _in_order(columns.pop(name), kind, order) for name, kind in self._kinds.items()}

    def _lay_out(self) -> None:
        rows = np.array(self._open, np.int64).reshape(-1, len(self._kinds))
        for (name, kind), column in zip(self._kinds.items(), rows.T, strict=True):
            self._columns[name].frombytes(column.astype(kind).tobytes())
        self._open = array("q")


def _in_order(values: "array[int]", kind: type[np.int64] | type[np.int32], order: npt.NDArray[np.int64]) -> Column:
    column = np.frombuffer(values, kind)
    if len(column) and (column == column[0]).all():
        return np.broadcast_to(column[:1].copy(), len(column))
    return column[order]
