"""A simulation's clock, and what is to happen at a time that is known before: a cancel, a fault, the end of a wait."""

from collections.abc import Callable
from heapq import heappush


class Clock:
    """Says what time it is; only the simulation's loop turns it.

    Attributes:
        now_ps: the time.
        coming: a heap of what is to happen: (time, number, what).
    """

    def __init__(self) -> None:
        self.now_ps = 0
        self.coming: list[tuple[int, int, Callable[[], None]]] = []
        self._turn_ps = -1
        self._turn = 0
        self._num_coming = 0

    def take_turn(self, at_ps: int, order: int) -> None:
        """Turn to the boundary of a worker."""
        self.now_ps = at_ps
        if self._turn_ps != at_ps:
            self._turn_ps, self._turn = at_ps, order
        elif order > self._turn:
            self._turn = order

    def has_passed(self, at_ps: int, order: int) -> bool:
        """Tell whether a boundary of a worker at this time, if it has one, has had its turn."""
        return self._turn_ps == at_ps and order < self._turn

    def at(self, at_ps: int, happen: Callable[[], None]) -> None:
        """Let something happen at a time; of two at one time, the first that was asked for comes first."""
        heappush(self.coming, (at_ps, self._num_coming, happen))
        self._num_coming += 1
