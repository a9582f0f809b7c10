"""A simulation's clock and its scheduled events: cancels, faults, ends of waits."""

from collections.abc import Callable
from heapq import heappush


class Clock:
    """Holds the current time; only the simulation's loop advances it.

    Attributes:
        now_ps: the time.
        coming: a heap of scheduled events: (time, number, callback).
    """

    def __init__(self) -> None:
        self.now_ps = 0
        self.coming: list[tuple[int, int, Callable[[], None]]] = []
        self._turn_ps = -1
        self._turn = 0
        self._num_coming = 0

    def take_turn(self, at_ps: int, order: int) -> None:
        """Advance to a worker's boundary."""
        self.now_ps = at_ps
        if self._turn_ps != at_ps:
            self._turn_ps, self._turn = at_ps, order
        elif order > self._turn:
            self._turn = order

    def has_passed(self, at_ps: int, order: int) -> bool:
        """Return whether a worker's boundary at this time, if it has one, has already had its turn."""
        return self._turn_ps == at_ps and order < self._turn

    def at(self, at_ps: int, happen: Callable[[], None]) -> None:
        """Schedule a callback at a time; of two at one time, the one scheduled first runs first."""
        heappush(self.coming, (at_ps, self._num_coming, happen))
        self._num_coming += 1
