"""Requests in columns: each is built on access, so that a million drawn ones take 32 MB.

Recorded requests may have blocks, priorities and sessions too. The ids of blocks, which are most of a trace, are in a
`Spool`.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.request import BLOCK_TOKENS, Turn, WorkloadRequest, of_columns


class Spool(Protocol):
    """Takes pieces, and returns each by its place and size."""

    def add(self, piece: bytes) -> int:
        """Add a piece; return its place."""
        ...

    def read(self, place: int, size: int) -> bytes:
        """Return the piece of this place and size."""
        ...


class MemorySpool:
    """A spool in memory."""

    def __init__(self) -> None:
        self._content = bytearray()

    def add(self, piece: bytes) -> int:
        """See `Spool`."""
        place = len(self._content)
        self._content += piece
        return place

    def read(self, place: int, size: int) -> bytes:
        """See `Spool`."""
        return bytes(self._content[place : place + size])


_NO_ADAPTER = -1
_ROWS_AT_ONCE = 1_000
_ID_BYTES = array("Q").itemsize

Rows = slice | npt.NDArray[np.bool_] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The ids of each prompt's blocks.

    Attributes:
        spool: of 8 bytes for each id.
        place: shape (n,), of a row's ids there.
        count: shape (n,), int32, of its ids; -1: not known.
        tokens: of a block.
    """

    spool: Spool
    place: npt.NDArray[np.int64]
    count: npt.NDArray[np.int32]
    tokens: int = BLOCK_TOKENS

    def where(self, rows: Rows) -> "Blocks":
        """Return a subset."""
        return replace(self, place=self.place[rows], count=self.count[rows])

    def ids(self, row: int) -> "array[int] | None":
        """Return the ids of a row's blocks; None: not known."""
        if (count := int(self.count[row])) < 0:
            return None
        return array("Q", self.spool.read(int(self.place[row]), count * _ID_BYTES))


@dataclass(frozen=True, slots=True)
class Chains:
    """Sessions whose prompts are whole: only a later turn's time follows from the turn before (`Turn.alone`).

    Attributes:
        session: shape (n,), int32; -1: the request is of none. The turns of each are adjacent and in order.
        number: shape (n,), int32, place in the session.
        think_seconds: shape (n,), from the end of the previous answer to the sending.
    """

    session: npt.NDArray[np.int32]
    number: npt.NDArray[np.int32]
    think_seconds: npt.NDArray[np.float64]

    def where(self, rows: Rows) -> "Chains":
        """Return a subset."""
        return Chains(self.session[rows], self.number[rows], self.think_seconds[rows])

    def turn(self, row: int, prompt_tokens: int) -> Turn | None:
        """Return a row's turn."""
        if (session := int(self.session[row])) < 0:
            return None
        return Turn(session, int(self.number[row]), prompt_tokens, float(self.think_seconds[row]), alone=True)

    def from_first(self, out: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return `out` with all turns that follow one of its rows in their session; shape (n,)."""
        out = out.copy()
        for row in np.flatnonzero(out & (self.session >= 0)).tolist():
            following = row + 1
            while following < len(out) and self.session[following] == self.session[row] and not out[following]:
                out[following] = True
                following += 1
        return out


class WorkloadColumns(Sequence[WorkloadRequest]):
    """A workload of one tenant.

    Args:
        index: shape (n,), meaning as in `WorkloadRequest`, like the next three.
        at_seconds: shape (n,).
        prompt_tokens: shape (n,).
        output_tokens: shape (n,).
        adapters: names.
        adapter: shape (n,), index of each request's adapter, -1 for the base model; None: all use the base model.
        blocks: of their prompts; None: none are known.
        priority: shape (n,), int32; None: 0.
        chains: their sessions; None: there are none.

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
        *,
        blocks: Blocks | None = None,
        priority: npt.NDArray[np.int32] | None = None,
        chains: Chains | None = None,
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
        self.blocks, self._priority, self.chains = blocks, priority, chains

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return chain.from_iterable(self._some())

    def _some(self) -> Iterator[list[WorkloadRequest]]:
        blocks, priority, chains = self.blocks, self._priority, self.chains
        for begin in range(0, len(self), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            made = of_columns(
                self._index[rows].tolist(),
                self.at_seconds[rows].tolist(),
                self.prompt_tokens[rows].tolist(),
                self.output_tokens[rows].tolist(),
                [self._adapters[adapter] for adapter in self._adapter[rows].tolist()],
            )
            for row, request in enumerate(made, start=begin):
                if blocks is not None:
                    request.hash_ids, request.block_tokens = blocks.ids(row), blocks.tokens
                if priority is not None:
                    request.priority = int(priority[row])
                if chains is not None:
                    request.turn = chains.turn(row, request.prompt_tokens)
            yield made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of any sequence that equals a list

    @overload
    def __getitem__(self, row: int) -> WorkloadRequest: ...
    @overload
    def __getitem__(self, row: slice) -> "WorkloadColumns": ...
    def __getitem__(self, row: int | slice) -> "WorkloadRequest | WorkloadColumns":
        if isinstance(row, slice):
            return self.where(row)
        one = range(len(self))[row]
        return next(iter(self.where(slice(one, one + 1))))

    def where(self, rows: Rows) -> "WorkloadColumns":
        """Return a subset, or the rows in another order."""
        return WorkloadColumns(
            self._index[rows],
            self.at_seconds[rows],
            self.prompt_tokens[rows],
            self.output_tokens[rows],
            self._adapters[:-1],
            self._adapter[rows],
            blocks=self.blocks and self.blocks.where(rows),
            priority=None if self._priority is None else self._priority[rows],
            chains=self.chains and self.chains.where(rows),
        )

    def sped_up(self, factor: float) -> "WorkloadColumns":
        """Return a copy with times and think times divided by a factor."""
        chains = self.chains and replace(self.chains, think_seconds=self.chains.think_seconds / factor)
        return self._like(at_seconds=self.at_seconds / factor, chains=chains)

    def with_adapters(self, adapters: Sequence[str], indices: npt.NDArray[np.int64]) -> "WorkloadColumns":
        """Return a copy whose i-th request has the adapter `adapters[indices[i]]`.

        Raises:
            ValueError: the number of indices is not that of requests, or an index is out of range.
        """
        outside = indices[(indices < 0) | (indices >= len(adapters))]
        if len(outside):
            raise ValueError(f"index {outside[0]} stands for none of {len(adapters)} adapters; they count from 0")
        return self._like(adapters=adapters, adapter=indices.astype(np.int32))

    def placed(self, at_seconds: npt.NDArray[np.float64], order: npt.NDArray[np.int64]) -> "WorkloadColumns":
        """Return the rows at other times, shape (n,), and in this order of their present rows, with a new `index`."""
        index = np.empty(len(self), np.int32)
        index[order] = np.arange(len(self), dtype=np.int32)
        return self._like(index=index, at_seconds=at_seconds).where(order)

    def _like(
        self,
        *,
        index: npt.NDArray[np.int32] | None = None,
        at_seconds: npt.NDArray[np.float64] | None = None,
        adapters: Sequence[str | None] | None = None,
        adapter: npt.NDArray[np.int32] | None = None,
        chains: Chains | None = None,
    ) -> "WorkloadColumns":
        return WorkloadColumns(
            self._index if index is None else index,
            self.at_seconds if at_seconds is None else at_seconds,
            self.prompt_tokens,
            self.output_tokens,
            self._adapters[:-1] if adapters is None else adapters,
            self._adapter if adapter is None else adapter,
            blocks=self.blocks,
            priority=self._priority,
            chains=self.chains if chains is None else chains,
        )
