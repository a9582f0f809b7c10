"""Waiting sequences in order of first arrival.

Sequences are appended in that order, except requeued ones: each may belong anywhere. They are sorted at the next read,
all at once, so N of them cost O(N log N). One that is older than all others (preempted) goes to the front.

The first ones are read at nearly every step (`front`), so more than are needed are kept as a list: only one in `KEPT`
fronts has to go through the table.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

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
