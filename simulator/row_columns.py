"""Rows of whole numbers that come one by one, kept as columns, each of a type of its own."""

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
        self._chunks: dict[str, list[Column]] = {name: [] for name in kinds}
        self._num_laid_out = 0

    def __len__(self) -> int:
        return self._num_laid_out + len(self._open) // len(self._kinds)

    def add(self, row: tuple[int, ...]) -> None:
        """Take a row."""
        self._open.extend(row)
        if len(self._open) == self._full:
            self._lay_out()

    def take(self, *, sort_by: str) -> dict[str, Column]:
        """Return all columns, the rows in order of one of them, and forget them. Takes memory for one column more."""
        self._lay_out()
        order = np.argsort(np.concatenate(self._chunks[sort_by]), kind="stable")
        taken: dict[str, Column] = {}
        for name, chunks in self._chunks.items():
            column = np.concatenate(chunks)
            chunks.clear()
            taken[name] = column[order]
        self._num_laid_out = 0
        return taken

    def _lay_out(self) -> None:
        rows = np.array(self._open, np.int64).reshape(-1, len(self._kinds))
        for (name, kind), column in zip(self._kinds.items(), rows.T, strict=True):
            self._chunks[name].append(column.astype(kind))
        self._num_laid_out += len(rows)
        self._open = array("q")
