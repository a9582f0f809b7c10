"""Timed events of a replica that have not taken effect yet.

Arrivals, cancels, recalls, and adapters to load or to retire.
"""

from collections import deque
from dataclasses import dataclass

from lorrery.scheduler.core.facts import Event, withdrawn
from lorrery.scheduler.core.sequence import Adapter, Sequence


@dataclass(frozen=True, slots=True)
class Recall:
    """A waiting sequence is to move to another worker."""

    handle: int
    to: str


@dataclass(frozen=True, slots=True)
class Retire:
    """New requests cannot name an adapter any more, or name another version of it."""

    adapter_key: str


@dataclass(frozen=True, slots=True)
class LoadOnRequest:
    """An operator wants an adapter loaded."""

    adapter: Adapter


Input = Sequence | int | Recall | Retire | LoadOnRequest
"""An arrival, a cancel by handle, a recall, or an adapter to retire or to load."""


class Inbox:
    """Events in order of time; ties in order of receipt.

    They arrive in that order, except those that a replay knows to be late; so sorting is rare.

    Attributes:
        next_ps: when the next event takes effect; None: there is none.
        num_arrivals: sequences in the inbox.
    """

    __slots__ = ("_events", "next_ps", "num_arrivals")

    def __init__(self) -> None:
        self._events: deque[tuple[int, Input]] = deque()
        self.num_arrivals = 0
        self.next_ps: int | None = None

    def put(self, at_ps: int, what: Input) -> None:
        """Add an event."""
        events = self._events
        is_last = not events or events[-1][0] <= at_ps
        events.append((at_ps, what))
        if not is_last:
            self._events = deque(sorted(events, key=lambda event: event[0]))
        if isinstance(what, Sequence):
            self.num_arrivals += 1
        self.next_ps = self._events[0][0]

    def take(self) -> Input:
        """Remove and return the next event; there must be one."""
        what = self._events.popleft()[1]
        if isinstance(what, Sequence):
            self.num_arrivals -= 1
        self.next_ps = self._events[0][0] if self._events else None
        return what

    def take_cancels(self, before_ps: int) -> list[int]:
        """Remove and return the cancels before a time, in order, of sequences whose arrival has taken effect."""
        arriving = self.arrivals() if self.num_arrivals else set()
        taken: list[int] = []
        kept: deque[tuple[int, Input]] = deque()
        for event in self._events:
            what = event[1]
            if isinstance(what, int) and event[0] < before_ps and what not in arriving:
                taken.append(what)
            else:
                kept.append(event)
        if taken:
            self._events = kept
            self.next_ps = kept[0][0] if kept else None
        return taken

    def due(self, at_ps: int) -> bool:
        """Return whether an event takes effect at this time or before."""
        return self.next_ps is not None and self.next_ps <= at_ps

    def clear(self) -> None:
        """Forget every event."""
        self._events.clear()
        self.num_arrivals, self.next_ps = 0, None

    def arrivals(self) -> set[int]:
        """Return the handles of the arrivals that have not taken effect."""
        return {what.handle for _, what in self._events if isinstance(what, Sequence)}

    def give_back(self, unfinished: dict[int, Sequence]) -> tuple[list[Sequence], list[Event]]:
        """Add the arrivals to `unfinished`, by handle, and remove what was cancelled.

        Cancels of other sequences stay; the rest is discarded. Returns the remaining sequences, in order of arrival,
        and the cancels that took effect.
        """
        cancelled: set[int] = set()
        kept: deque[tuple[int, Input]] = deque()
        for event in self._events:
            what = event[1]
            if isinstance(what, Sequence):
                unfinished[what.handle] = what
            elif isinstance(what, int):
                if what in unfinished:
                    cancelled.add(what)
                else:
                    kept.append(event)
        self._events, self.num_arrivals = kept, 0
        self.next_ps = kept[0][0] if kept else None
        ordered = sorted(unfinished.values(), key=lambda sequence: (sequence.arrived_ps, sequence.handle))
        left: list[Sequence] = []
        gone: list[Event] = []
        for sequence in ordered:
            if sequence.aborted or sequence.handle in cancelled:
                gone.append(withdrawn(sequence, sequence.produced_tokens))
            else:
                left.append(sequence)
        return left, gone
