"""Drawn requests in columns: each request is built on access, so that a million take 32 MB."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.request import WorkloadRequest, of_columns

__all__ = ["DrawnRequests"]

_NO_ADAPTER = -1
_ROWS_AT_ONCE = 1_000


class DrawnRequests(Sequence[WorkloadRequest]):
    """A workload of one tenant without sessions and known prefixes.

    Args:
        index: shape (n,), meaning as in `WorkloadRequest`, like the next three.
        at_seconds: shape (n,).
        prompt_tokens: shape (n,).
        output_tokens: shape (n,).
        adapters: names.
        adapter: shape (n,), index of each request's adapter, -1 for the base model; None: all use the base model.

    Raises:
        ValueError: columns of different lengths.
    """

    def __init__(
        self,
        index: npt.NDArray[np.int32],
        at_seconds: npt.NDArray[np.float64],
        prompt_tokens: npt.NDArray[np.int64],
        output_tokens: npt.NDArray[np.int64],
        adapters: Sequence[str | None] = (),
        adapter: npt.NDArray[np.int32] | None = None,
    ) -> None:
        lengths = [len(index), len(at_seconds), len(prompt_tokens), len(output_tokens)]
        if adapter is not None:
            lengths.append(len(adapter))
        if len(set(lengths)) > 1:
            raise ValueError(f"columns have {', '.join(map(str, lengths))} rows; give each as many")
        self._index = index
        self.at_seconds = at_seconds
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self._adapters: tuple[str | None, ...] = (*adapters, None)  # the last is for `_NO_ADAPTER`
        self._adapter = np.full(len(index), _NO_ADAPTER, np.int32) if adapter is None else adapter

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return chain.from_iterable(self._some())

    def _some(self) -> Iterator[list[WorkloadRequest]]:
        for begin in range(0, len(self), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            yield of_columns(
                self._index[rows].tolist(),
                self.at_seconds[rows].tolist(),
                self.prompt_tokens[rows].tolist(),
                self.output_tokens[rows].tolist(),
                [self._adapters[adapter] for adapter in self._adapter[rows].tolist()],
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of any sequence that equals a list

    @overload
    def __getitem__(self, row: int) -> WorkloadRequest: ...
    @overload
    def __getitem__(self, row: slice) -> "DrawnRequests": ...
    def __getitem__(self, row: int | slice) -> "WorkloadRequest | DrawnRequests":
        if isinstance(row, slice):
            return self.where(row)
        one = range(len(self))[row]
        return next(iter(self.where(slice(one, one + 1))))

    def where(self, rows: slice | npt.NDArray[np.bool_]) -> "DrawnRequests":
        """Return a subset."""
        return DrawnRequests(
            self._index[rows],
            self.at_seconds[rows],
            self.prompt_tokens[rows],
            self.output_tokens[rows],
            self._adapters[:-1],
            self._adapter[rows],
        )

    def sped_up(self, factor: float) -> "DrawnRequests":
        """Return a copy with times divided by a factor."""
        return self._like(self.at_seconds / factor, self._adapters[:-1], self._adapter)

    def with_adapters(self, adapters: Sequence[str], indices: npt.NDArray[np.int64]) -> "DrawnRequests":
        """Return a copy whose i-th request has the adapter `adapters[indices[i]]`.

        Raises:
            ValueError: the number of indices is not that of requests, or an index is out of range.
        """
        outside = indices[(indices < 0) | (indices >= len(adapters))]
        if len(outside):
            raise ValueError(f"index {outside[0]} stands for none of {len(adapters)} adapters; they count from 0")
        return self._like(self.at_seconds, adapters, indices.astype(np.int32))

    def _like(
        self, at_seconds: npt.NDArray[np.float64], adapters: Sequence[str | None], adapter: npt.NDArray[np.int32]
    ) -> "DrawnRequests":
        return DrawnRequests(self._index, at_seconds, self.prompt_tokens, self.output_tokens, adapters, adapter)
