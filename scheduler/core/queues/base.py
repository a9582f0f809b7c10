"""What a queue must be able to do, and the waiting list that most of them share."""

from collections.abc import Iterator
from typing import Protocol

from scheduler.core.running import Running
from scheduler.core.sequence import Sequence


class Queue(Protocol):
    """Decides which waiting sequences enter the batch.

    `admit` is the only method that takes sequences out by decision; it is called at step boundaries only.
    """

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        ...

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the waiting sequences in queue order."""
        ...

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Let a sequence wait; one that was queued before keeps its place by first arrival."""
        ...

    def cancel(self, handle: int) -> Sequence | None:
        """Return a cancelled sequence; remove it, or mark it to be swept (strict). None: no such sequence waits."""
        ...

    def clear(self) -> list[Sequence]:
        """Remove and return all that wait, in order."""
        ...

    def admit(self, running: Running, at_ps: int) -> list[Sequence]:
        """Take out and return the sequences that enter the batch now, in order; empty if none may."""
        ...

    def steps_blocked(self, running: Running, limit: int) -> int:
        """Return for how many decode steps `admit` would go on to return nothing, at least 1, at most `limit`.

        Asked right after `admit` returned nothing. `limit` is so small that no running sequence ends within it.
        A queue that cannot tell returns 1.
        """
        ...

    def heeds_arrivals(self) -> bool:
        """Tell whether one more arrival could change what `admit` has just answered."""
        ...

    def can_ever_admit(self, sequence: Sequence) -> str | None:
        """Return None if an empty batch would take it, else why not: what, the limit, what to do."""
        ...


class WaitingList:
    """Sequences in order of first arrival, with removal by handle in O(1)."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

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

    def pop(self, handle: int) -> Sequence | None:
        """Remove and return the sequence of that handle, if it waits."""
        return self._sequences.pop(handle, None)

    def clear(self) -> list[Sequence]:
        """Remove and return all, in order."""
        sequences = list(self._sequences.values())
        self._sequences.clear()
        return sequences
