"""Which of many workers has the least load, and of those the fewest KV tokens, without looking at all of them.

A member says how it stands whenever its load may have changed or its KV tokens may have become fewer (`Member`): after
each submit, each plan, and each commit that ends a sequence. In between the tokens only become more, by steps that a
driver has perhaps not committed yet. So each worker has a place (load, tokens at least, number) in a heap, which is
never behind the worker's true one. The first place is brought up to date: if it is still the first, it is the least;
otherwise the next one is looked at.

Cost: a logarithm for each note that moves a worker forward, and for each look. A worker is looked at again only when
its tokens may be the fewest, so looks are few where many workers are equally loaded. Nothing is kept before the first
`least`.
"""

from collections.abc import Sequence as Many
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

Place = tuple[int, int, int]
"""Load, KV tokens at least, number of the worker."""


class Loaded(Protocol):
    """The figures that the order follows from; see `placements.base.Candidate`."""

    @property
    def load(self) -> int:
        """See there."""
        ...

    @property
    def kv_tokens(self) -> int:
        """See there."""
        ...


class LoadOrder:
    """See the module.

    Args:
        candidates: the workers, by number; they stay the same.

    Attributes:
        is_kept: whether notes have an effect.
    """

    __slots__ = ("_current", "_heap", "candidates", "is_kept")

    def __init__(self, candidates: Many[Loaded]) -> None:
        self.candidates = candidates
        self.is_kept = False
        self._current: list[Place] = []
        self._heap: list[Place] = []

    def note(self, number: int, load: int, kv_tokens: int) -> None:
        """Take note of a worker's load, and of the tokens that it has at least until the next note."""
        current, heap = self._current, self._heap
        before = current[number]
        if load == before[0] and kv_tokens >= before[1]:
            return
        place = current[number] = (load, kv_tokens, number)
        if len(heap) > 4 * len(current) + 64:
            heap[:] = current
            heapify(heap)
        else:
            heappush(heap, place)

    def least(self) -> int:
        """Return the number of the worker with the least load; ties: fewest KV tokens, then the first."""
        candidates, current, heap = self.candidates, self._current, self._heap
        if not self.is_kept:
            current[:] = [(candidate.load, 0, number) for number, candidate in enumerate(candidates)]
            heap[:] = current
            heapify(heap)
            self.is_kept = True
        while True:
            place = heap[0]
            load, at_least, number = place
            if current[number] != place:
                heappop(heap)
                continue
            kv_tokens = candidates[number].kv_tokens if load else 0
            if kv_tokens <= at_least:
                return number
            if current[number] == place:  # it has noted nothing while it was brought up to date
                heapreplace(heap, (load, kv_tokens, number))
                current[number] = (load, kv_tokens, number)
