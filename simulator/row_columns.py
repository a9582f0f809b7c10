"""Rows of whole numbers that come one by one, and are wanted as columns in the end, each of a type of its own.

Until then they wait in a file once there are many (`simulator.spilled_rows`): columns that grow side by side leave
holes in a process's memory, half as large as they are.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lorrery.simulator.spilled_rows import SpilledRows

Column = npt.NDArray[Any]


class RowColumns:
    """Takes rows, and gives columns.

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
        """Take a row."""
        self._rows.add(row)
        self._num_rows += 1

    def take(self, *, sort_by: str) -> dict[str, Column]:
        """Return all columns, the rows in order of one of them, and forget them; read-only where all rows are alike.

        Takes memory for one column more; such a column takes none.

        Raises:
            OverflowError: a value is beyond its column's type.
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
