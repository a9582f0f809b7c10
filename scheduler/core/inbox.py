"""Timed events of a replica that have not taken effect yet.

Arrivals, cancels, recalls, and adapters to load or to retire.
"""

from collections import deque
from dataclasses import dataclass

from lorrery.scheduler.core.facts import Event, withdrawn
from lorrery.scheduler.core.front_end import FrontEnd
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.worker.device.deployment import NO_FRONT_END, FrontEndCost


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

    They arrive in that order, except those that a replay knows to be late, and arrivals that a front end delays. What
    concerns a sequence that is still there takes effect right after its arrival.

    Args:
        front_end: delays arrivals.

    Attributes:
        next_ps: when the next event takes effect; None: there is none.
        num_arrivals: sequences in the inbox.
    """

    __slots__ = ("_events", "_front_end", "_later", "next_ps", "num_arrivals")

    def __init__(self, front_end: FrontEndCost = NO_FRONT_END) -> None:
        self._events: deque[tuple[int, Input]] = deque()
        self._front_end = None if front_end == NO_FRONT_END else FrontEnd(front_end)
        self._later: dict[int, list[Input]] = {}  # by the handle of a sequence in the front end
        self.num_arrivals = 0
        self.next_ps: int | None = None

    def put(self, at_ps: int, what: Input) -> None:
        """Add an event."""
        front_end = self._front_end
        if front_end is None or not self._is_in_front(front_end, at_ps, what):
            self._put(at_ps, what)
        self._note_next()

    def _is_in_front(self, front_end: FrontEnd, at_ps: int, what: Input) -> bool:
        """Give a front end an arrival, or what concerns one that it has; return whether the event is neither."""
        self._take_ready(front_end, at_ps)
        if isinstance(what, Sequence):
            front_end.take(what, at_ps)
            self._later[what.handle] = []
            self.num_arrivals += 1
            return True
        handle = what if isinstance(what, int) else what.handle if isinstance(what, Recall) else None
        later = None if handle is None else self._later.get(handle)
        if later is None:
            return False
        later.append(what)
        return True

    def _take_ready(self, front_end: FrontEnd, until_ps: int) -> None:
        if front_end.next_ps <= until_ps:
            for ready_ps, sequence in front_end.ready(until_ps):
                self.num_arrivals -= 1
                self._put(ready_ps, sequence)
                for what in self._later.pop(sequence.handle):
                    self._put(ready_ps, what)

    def _note_next(self) -> None:
        next_ps = self._events[0][0] if self._events else None
        front_end = self._front_end
        if front_end is not None and front_end.num and (next_ps is None or front_end.next_ps < next_ps):
            next_ps = front_end.next_ps
        self.next_ps = next_ps

    def _put(self, at_ps: int, what: Input) -> None:
        events = self._events
        is_last = not events or events[-1][0] <= at_ps
        events.append((at_ps, what))
        if not is_last:
            self._events = deque(sorted(events, key=lambda event: event[0]))
        if isinstance(what, Sequence):
            self.num_arrivals += 1

    def take(self) -> Input:
        """Remove and return the next event; there must be one."""
        if self._front_end is not None:
            assert self.next_ps is not None
            self._take_ready(self._front_end, self.next_ps)
        what = self._events.popleft()[1]
        if isinstance(what, Sequence):
            self.num_arrivals -= 1
        self._note_next()
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
            self._note_next()
        return taken

    def due(self, at_ps: int) -> bool:
        """Return whether an event takes effect at this time or before."""
        return self.next_ps is not None and self.next_ps <= at_ps

    def clear(self) -> None:
        """Forget every event."""
        self._events.clear()
        self._later.clear()
        if self._front_end is not None:
            self._front_end.clear()
        self.num_arrivals, self.next_ps = 0, None

    def arrivals(self) -> set[int]:
        """Return the handles of the arrivals that have not taken effect."""
        return {what.handle for _, what in self._events if isinstance(what, Sequence)}.union(self._later)

    def give_back(self, unfinished: dict[int, Sequence]) -> tuple[list[Sequence], list[Event]]:
        """Add the arrivals to `unfinished`, by handle, and remove what was cancelled.

        Cancels of other sequences stay; the rest is discarded. Returns the remaining sequences, in order of arrival,
        and the cancels that took effect.
        """
        cancelled: set[int] = set()
        kept: deque[tuple[int, Input]] = deque()
        if self._front_end is not None:
            unfinished.update({sequence.handle: sequence for sequence in self._front_end.sequences()})
            cancelled.update(handle for handle, later in self._later.items() if handle in later)
            self._front_end.clear()
            self._later.clear()
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
