"""Who waits, in order of first arrival."""

from collections.abc import Iterable, Iterator

from lorrery.scheduler.core.sequence import Sequence


class WaitingList:
    """Sequences in order of first arrival, with removal by handle in O(1)."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences.values())

    @property
    def first(self) -> Sequence | None:
        """The one that arrived first."""
        return next(iter(self), None)

    def get(self, handle: int) -> Sequence | None:
        """Return the waiting sequence of that handle."""
        return self._sequences.get(handle)

    def append(self, sequence: Sequence) -> None:
        """Add at the end, or, if one that arrived later waits (after a loss), at its place by arrival (O(n))."""
        latest = next(reversed(self._sequences.values()), None)
        self._sequences[sequence.handle] = sequence
        if latest is not None and latest.arrived_ps > sequence.arrived_ps:
            self._sequences = {s.handle: s for s in sorted(self, key=lambda s: s.arrived_ps)}

    def remove(self, handle: int) -> None:
        """Remove one that is known to wait."""
        del self._sequences[handle]

    def remove_all(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences that are known to wait."""
        for sequence in sequences:
            del self._sequences[sequence.handle]

    def pop(self, handle: int) -> Sequence | None:
        """Remove and return the sequence of that handle, if it waits."""
        return self._sequences.pop(handle, None)

    def mark(self, handle: int) -> Sequence | None:
        """Mark a sequence as cancelled, and return it the first time; it stays."""
        sequence = self._sequences.get(handle)
        if sequence is None or sequence.aborted:
            return None
        sequence.aborted = True
        return sequence

    def clear(self) -> list[Sequence]:
        """Remove and return all, in order."""
        sequences = list(self._sequences.values())
        self._sequences.clear()
        return sequences
