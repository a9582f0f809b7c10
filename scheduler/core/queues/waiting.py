"""Waiting sequences in order of first arrival.

Sequences are appended in that order, except requeued ones: each may belong anywhere. They are sorted at the next read,
all at once, so N of them cost O(N log N). One that is older than all others (preempted) goes to the front.

The first ones are read at nearly every step (`front`), so more than are needed are kept as a list: only one in `KEPT`
fronts has to go through the table.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Final

from lorrery.scheduler.core.admission import AdmissionPass, Blocked
from lorrery.scheduler.core.sequence import Sequence

KEPT: Final = 4
"""Length of the kept list, as a multiple of the front's."""


class WaitingList:
    """Sequences in order of first arrival, with removal by handle in O(1).

    Attributes:
        by_handle: all of them; read-only, and in order only where this class says so.
    """

    def __init__(self) -> None:
        self.by_handle: OrderedDict[int, Sequence] = OrderedDict()
        self._in_order = True
        self._first: list[Sequence] = []  # some of the first arrivals, in order
        self._front: list[Sequence] = []  # last result of `front`
        self._front_length = -1  # its length argument; -1: the result may be out of date

    def __len__(self) -> int:
        return len(self.by_handle)

    def __iter__(self) -> Iterator[Sequence]:
        if not self._in_order:
            self._put_in_order()
        return iter(self.by_handle.values())

    def __reversed__(self) -> Iterator[Sequence]:
        if not self._in_order:
            self._put_in_order()
        return reversed(self.by_handle.values())

    @property
    def first(self) -> Sequence | None:
        """The earliest arrival; None: nothing waits."""
        return next(iter(self), None)

    def front(self, length: int) -> list[Sequence]:
        """Return the `length` earliest arrivals, or all: the same list object while they stay; read-only."""
        if self._front_length != length:
            if len(self._first) < length and len(self._first) < len(self.by_handle):
                self._first = list(islice(self, KEPT * length))
            self._front, self._front_length = self._first[:length], length
        return self._front

    def get(self, handle: int) -> Sequence | None:
        """Return the waiting sequence of that handle."""
        return self.by_handle.get(handle)

    def append(self, sequence: Sequence) -> None:
        """Add at the end, or, if a later arrival already waits (after a loss), at its place by arrival."""
        sequences = self.by_handle
        if len(sequences) < self._front_length:
            self._front_length = -1
        if self._in_order and sequences and next(reversed(sequences.values())).arrived_ps > sequence.arrived_ps:
            self._first, self._front_length = [], -1
            if next(iter(sequences.values())).arrived_ps > sequence.arrived_ps:
                sequences[sequence.handle] = sequence
                sequences.move_to_end(sequence.handle, last=False)
                return
            self._in_order = False
        sequences[sequence.handle] = sequence

    def put_first(self, sequence: Sequence) -> None:
        """Add before all others, whatever their arrival; after a loss it is sorted in like the others."""
        self.by_handle[sequence.handle] = sequence
        self.by_handle.move_to_end(sequence.handle, last=False)
        self._first, self._front_length = [], -1

    def _put_in_order(self) -> None:
        by_arrival = sorted(self.by_handle.values(), key=lambda sequence: sequence.arrived_ps)
        self.by_handle = OrderedDict([(sequence.handle, sequence) for sequence in by_arrival])
        self._in_order = True

    def remove(self, handle: int) -> None:
        """Remove a sequence that is known to wait."""
        self._leaves(self.by_handle.pop(handle))

    def remove_all(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences that are known to wait."""
        for sequence in sequences:
            del self.by_handle[sequence.handle]
            self._leaves(sequence)

    def pop(self, handle: int) -> Sequence | None:
        """Remove and return the sequence of that handle, if it waits."""
        sequence = self.by_handle.pop(handle, None)
        if sequence is not None:
            self._leaves(sequence)
        return sequence

    def _leaves(self, sequence: Sequence) -> None:
        """Note that a sequence has left `by_handle`: remove it from the kept list, if it is there."""
        for place, one in enumerate(self._first):
            if one is sequence:
                del self._first[place]
                if place < self._front_length:
                    self._front_length = -1
                return

    def mark(self, handle: int) -> Sequence | None:
        """Mark a sequence as cancelled, and return it the first time; it stays."""
        sequence = self.by_handle.get(handle)
        if sequence is None or sequence.aborted:
            return None
        sequence.aborted = True
        return sequence

    def clear(self) -> list[Sequence]:
        """Remove and return all, in order."""
        sequences = list(self)
        self._first, self._front_length = [], -1
        self.by_handle.clear()
        return sequences


_Head = tuple[int, int, Sequence, Iterator[Sequence]]


class WaitingByAdapter(WaitingList):
    """Waiting sequences in order of first arrival, of all adapters or of some.

    Queues that prefer some adapters would have to scan all waiting sequences for theirs. Here each adapter has a list
    of its own beside the list of all.

    Invariant: an adapter's list is the list of all without the others. Both are in order of arrival, ties in order of
    appending (`WaitingList`), so `ordinals`, which number the appends, decide between adapters.

    Cost: that of the list of all, twice; `of` O(1) for each sequence taken from it, `merged` O(log adapters).
    """

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


MAX_OVERTAKES = 30


class Patience:
    """A bound on how many sequences may overtake the one that has waited longest (the head).

    Queues that prefer some sequences to others (by adapter, by length) would let the others starve while enough
    preferred ones arrive. S-LoRA's have no such bound, except its one-adapter queue, which stops at 30 others; that
    number is used here too.

    Args:
        most: largest number allowed.
    """

    def __init__(self, most: int = MAX_OVERTAKES) -> None:
        self._most = most
        self._head: Sequence | None = None
        self._overtakes = 0

    def left(self, head: Sequence) -> int:
        """Return how many may still enter before the head must."""
        return self._most - self._overtakes if head is self._head else self._most

    def admit(
        self, admission: AdmissionPass, head: Sequence, sequences: Iterable[Sequence], left: int
    ) -> tuple[Sequence, Blocked] | None:
        """Try sequences up to the first refusal, which is returned, or to one that must not overtake the head.

        Args:
            admission: the pass.
            head: the one that has waited longest.
            sequences: in order; read one by one.
            left: how many may enter before the head must.
        """
        refused: tuple[Sequence, Blocked] | None = None
        for sequence in sequences:
            if not left and sequence is not head and head not in admission.admitted:
                break
            if not admission.admit(sequence):
                refused = admission.refused
                break
            left -= left > 0
        self.note(head, admission.admitted)
        return refused

    def note(self, head: Sequence, admitted: list[Sequence]) -> None:
        """Count the admitted sequences while this was the head; none: nothing changes."""
        if not admitted:
            return
        overtakes = self._most - self.left(head) + len(admitted)
        self._head, self._overtakes = (None, 0) if head in admitted else (head, overtakes)
