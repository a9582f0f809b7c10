"""Requests that were drawn, in columns: each is made when it is looked at, so that a million take 32 MB."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.request import WorkloadRequest

__all__ = ["DrawnRequests"]

_NO_ADAPTER = -1
_ROWS_AT_ONCE = 10_000


class DrawnRequests(Sequence[WorkloadRequest]):
    """A workload of one tenant without sessions and known prefixes.

    Args:
        index: shape (n,), as in `WorkloadRequest`, as those that follow.
        at_seconds: shape (n,).
        prompt_tokens: shape (n,).
        output_tokens: shape (n,).
        adapters: names.
        adapter: shape (n,), of each request the index of its adapter, -1 for the base model; None: all are for that.

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
        self._adapters: tuple[str | None, ...] = (*adapters, None)  # the last is that of `_NO_ADAPTER`
        self._adapter = np.full(len(index), _NO_ADAPTER, np.int32) if adapter is None else adapter

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        columns = self._index, self.at_seconds, self.prompt_tokens, self.output_tokens, self._adapter
        adapters = self._adapters
        for begin in range(0, len(self), _ROWS_AT_ONCE):
            some = (column[begin : begin + _ROWS_AT_ONCE].tolist() for column in columns)
            for index, at_seconds, prompt_tokens, output_tokens, adapter in zip(*some, strict=True):
                yield WorkloadRequest(index, at_seconds, prompt_tokens, output_tokens, adapters[adapter])

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
        """Return some of them."""
        return DrawnRequests(
            self._index[rows],
            self.at_seconds[rows],
            self.prompt_tokens[rows],
            self.output_tokens[rows],
            self._adapters[:-1],
            self._adapter[rows],
        )

    def sped_up(self, factor: float) -> "DrawnRequests":
        """Return them with their times divided by a factor."""
        return self._like(self.at_seconds / factor, self._adapters[:-1], self._adapter)

    def with_adapters(self, adapters: Sequence[str], indices: npt.NDArray[np.int64]) -> "DrawnRequests":
        """Return them with `adapters[indices[i]]` in the i-th of them.

        Raises:
            ValueError: another number of indices than of requests, or one that is below 0 or stands for no adapter.
        """
        outside = indices[(indices < 0) | (indices >= len(adapters))]
        if len(outside):
            raise ValueError(f"index {outside[0]} stands for none of {len(adapters)} adapters; they count from 0")
        return self._like(self.at_seconds, adapters, indices.astype(np.int32))

    def _like(
        self, at_seconds: npt.NDArray[np.float64], adapters: Sequence[str | None], adapter: npt.NDArray[np.int32]
    ) -> "DrawnRequests":
        return DrawnRequests(self._index, at_seconds, self.prompt_tokens, self.output_tokens, adapters, adapter)
