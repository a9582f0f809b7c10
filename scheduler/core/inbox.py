"""What has come in for a replica and has not taken effect: arrivals and cancels, each with its time."""

from heapq import heappop, heappush

from scheduler.core.plan import Cancelled, Event
from scheduler.core.sequence import Sequence


class Inbox:
    """Events in order of (time, number of receipt)."""

    __slots__ = ("_events", "_num_arrivals", "_num_received")

    def __init__(self) -> None:
        self._events: list[tuple[int, int, Sequence | int]] = []
        self._num_received = 0
        self._num_arrivals = 0

    @property
    def num_arrivals(self) -> int:
        """Sequences in here."""
        return self._num_arrivals

    @property
    def next_ps(self) -> int | None:
        """When the next event takes effect; None: there is none."""
        return self._events[0][0] if self._events else None

    def put(self, at_ps: int, what: Sequence | int) -> None:
        """Take in an arrival, or a cancel by its handle."""
        heappush(self._events, (at_ps, self._num_received, what))
        self._num_received += 1
        self._num_arrivals += not isinstance(what, int)

    def take(self, at_ps: int) -> Sequence | int | None:
        """Remove and return the next event stamped at or before this time; None: there is none."""
        if not self._events or self._events[0][0] > at_ps:
            return None
        what = heappop(self._events)[2]
        self._num_arrivals -= not isinstance(what, int)
        return what

    def give_back(self, unfinished: dict[int, Sequence]) -> tuple[list[Sequence], list[Event]]:
        """Add the arrivals to `unfinished`, by handle, and take out what was cancelled.

        Cancels of others stay. Returns what is left, in order of arrival, and the cancels that took effect.
        """
        cancelled: set[int] = set()
        kept: list[tuple[int, int, Sequence | int]] = []
        for event in sorted(self._events, key=lambda event: event[:2]):
            what = event[2]
            if not isinstance(what, int):
                unfinished[what.handle] = what
            elif what in unfinished:
                cancelled.add(what)
            else:
                kept.append(event)
        self._events, self._num_arrivals = kept, 0
        ordered = sorted(unfinished.values(), key=lambda sequence: (sequence.arrived_ps, sequence.handle))
        gone = [sequence for sequence in ordered if sequence.aborted or sequence.handle in cancelled]
        return [sequence for sequence in ordered if sequence not in gone], [Cancelled(sequence) for sequence in gone]
