"""A column of a few distinct values, such as worker names: four bytes a row, whatever the values are."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

__all__ = ["Labels"]

T = TypeVar("T", bound=Hashable)
_ROWS_AT_ONCE = 10_000


class Labels(Sequence[T], Generic[T]):
    """See the module.

    Args:
        codes: shape (rows,), int32: index of each row's value.
        values: all distinct.
    """

    __slots__ = ("codes", "values")

    def __init__(self, codes: npt.NDArray[np.int32], values: Sequence[T]) -> None:
        self.codes = codes
        self.values = values

    @classmethod
    def of(cls, rows: Iterable[T]) -> "Labels[T]":
        """Encode values given one by one."""
        code_of: dict[T, int] = {}
        codes = np.fromiter((code_of.setdefault(one, len(code_of)) for one in rows), np.int32)
        return cls(codes, list(code_of))

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[T]:
        values = self.values
        for begin in range(0, len(self.codes), _ROWS_AT_ONCE):
            for code in self.codes[begin : begin + _ROWS_AT_ONCE].tolist():
                yield values[code]

    @overload
    def __getitem__(self, row: int) -> T: ...
    @overload
    def __getitem__(self, row: slice) -> "Labels[T]": ...
    def __getitem__(self, row: int | slice) -> "T | Labels[T]":
        return Labels(self.codes[row], self.values) if isinstance(row, slice) else self.values[self.codes[row]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of any sequence that equals a list

    def are(self, value: T) -> npt.NDArray[np.bool_]:
        """Return which rows have a value; shape (rows,)."""
        codes = [code for code, one in enumerate(self.values) if one == value]
        return np.isin(self.codes, codes)

    def rows_of(self) -> "list[tuple[T, npt.NDArray[np.int64]]]":
        """Return each value that there is, and its rows in order; values in order of their first rows."""
        order = np.argsort(self.codes, kind="stable")
        counts = np.bincount(self.codes, minlength=len(self.values))
        parts = np.split(order, np.cumsum(counts)[:-1]) if len(self.values) else []
        found = [(value, rows) for value, rows in zip(self.values, parts, strict=True) if len(rows)]
        return sorted(found, key=lambda one: int(one[1][0]))

    def as_text(self, text: "Callable[[T], str]" = str) -> npt.NDArray[np.str_]:
        """Return the rows as an array of texts."""
        if not len(self):
            return np.array([], np.str_)
        return np.array([text(value) for value in self.values], np.str_)[self.codes]
