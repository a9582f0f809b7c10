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
        self._num_coming = 0

    def at(self, at_ps: int, happen: Callable[[], None]) -> None:
        """Let something happen at a time; of two at one time, the first that was asked for comes first."""
        heappush(self.coming, (at_ps, self._num_coming, happen))
        self._num_coming += 1
