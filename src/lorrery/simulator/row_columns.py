"""Rows of integers that arrive one by one and are read as columns in the end, each of its own type.

Until then they spill to a file once there are many (`simulator.spilled_rows`): columns that grow side by side
fragment a process's memory, by half of their size.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lorrery.simulator.spilled_rows import SpilledRows

Column = npt.NDArray[Any]


class RowColumns:
    """Takes rows and returns columns.

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
