"""Waiting sequences in order of first arrival, of all adapters or of some.

Queues that prefer some adapters would have to scan all waiting sequences for theirs. Here each adapter has a list of
its own beside the list of all.

Invariant: an adapter's list is the list of all without the others. Both are in order of arrival, ties in order of
appending (`WaitingList`), so `ordinals`, which number the appends, decide between adapters.

Cost: that of the list of all, twice; `of` O(1) for each sequence taken from it, `merged` O(log adapters).
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace

from lorrery.scheduler.core.queues.waiting import WaitingList
from lorrery.scheduler.core.sequence import Sequence

_Head = tuple[int, int, Sequence, Iterator[Sequence]]


class WaitingByAdapter(WaitingList):
    """Sequences in order of first arrival, with removal by handle in O(1)."""

    def __init__(self) -> None:
        super().__init__()
        self._by_adapter: dict[str | None, WaitingList] = {}  # by key; adapters with any
        self._ordinals: dict[int, int] = {}  # by handle
        self._num_come = 0
        self._put_first: dict[int, int] = {}  # by handle: a place before all arrivals

    def append(self, sequence: Sequence) -> None:
        """Add at the end, or, if a later arrival already waits (after a loss), at its place by arrival."""
        super().append(sequence)
        self._ordinals[sequence.handle] = self._num_come
        self._num_come += 1
        key = adapter_key(sequence)
        of_adapter = self._by_adapter.get(key)
        if of_adapter is None:
            of_adapter = self._by_adapter[key] = WaitingList()
        of_adapter.append(sequence)

    def put_first(self, sequence: Sequence) -> None:
        """Add before all others, whatever their arrival."""
        super().put_first(sequence)
        self._ordinals[sequence.handle] = self._num_come
        self._num_come += 1
        self._put_first[sequence.handle] = -self._num_come
        key = adapter_key(sequence)
        of_adapter = self._by_adapter.get(key)
        if of_adapter is None:
            of_adapter = self._by_adapter[key] = WaitingList()
        of_adapter.put_first(sequence)

    def _leaves(self, sequence: Sequence) -> None:
        super()._leaves(sequence)
        handle, key = sequence.handle, adapter_key(sequence)
        del self._ordinals[handle]
        if self._put_first:
            self._put_first.pop(handle, None)
        of_adapter = self._by_adapter[key]
        of_adapter.remove(handle)
        if not len(of_adapter):
            del self._by_adapter[key]

    def clear(self) -> list[Sequence]:
        """Remove and return all, in order."""
        self._by_adapter.clear()
        self._ordinals.clear()
        self._put_first.clear()
        return super().clear()

    def of(self, key: str | None) -> Iterator[Sequence]:
        """Iterate over the sequences of one adapter, in order; None is the base model."""
        of_adapter = self._by_adapter.get(key)
        return iter(()) if of_adapter is None else iter(of_adapter)

    @property
    def adapters(self) -> Iterable[str | None]:
        """Keys of the adapters of waiting sequences; a view."""
        return self._by_adapter.keys()

    def merged(self, keys: Iterable[str | None]) -> "Merged":
        """Begin to go through the sequences of some adapters, in order; the lists must not change meanwhile."""
        heads: list[_Head] = []
        for key in keys:
            rest = self.of(key)
            for sequence in rest:
                place = self._put_first.get(sequence.handle, sequence.arrived_ps)
                heads.append((place, self._ordinals[sequence.handle], sequence, rest))
                break
        return Merged(heads, self._ordinals, self._put_first)


class Merged:
    """Sequences of some adapters, in order.

    Args:
        heads: the first sequence of each adapter, with the iterator over those that follow it.
        ordinals: of all, by handle.
        put_first: places of those that are before all arrivals, by handle.
    """

    def __init__(self, heads: list[_Head], ordinals: dict[int, int], put_first: dict[int, int]) -> None:
        heapify(heads)  # ordinals differ, so later fields are never compared
        self._heads = heads
        self._ordinals = ordinals
        self._put_first = put_first

    @property
    def first(self) -> Sequence | None:
        """The next sequence."""
        return self._heads[0][2] if self._heads else None

    def take(self) -> None:
        """Go on to the next sequence."""
        rest = self._heads[0][3]
        for sequence in rest:
            place = self._put_first.get(sequence.handle, sequence.arrived_ps)
            heapreplace(self._heads, (place, self._ordinals[sequence.handle], sequence, rest))
            return
        heappop(self._heads)

    def drop_adapter(self) -> None:
        """Leave out the next sequence, and all that have its adapter."""
        heappop(self._heads)


def adapter_key(sequence: Sequence) -> str | None:
    """Return the key of the sequence's adapter: its name and version; None is the base model."""
    return None if sequence.adapter is None else sequence.adapter.key
