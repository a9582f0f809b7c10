"""How many wait and run at each worker of a scheduler, in order, without looking at all of them.

A member says so itself whenever it may have changed (`Member`), and who cannot start what waits is then known at once.
Who has the fewest waiting is asked for only where somebody cannot: then those that have changed since come into a heap,
for a logarithm each. It has entries that are out of date, which are passed over when they come to its top.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

Standing = tuple[int, int, int]
"""Sequences that wait at a worker, sequences that run there, and its number, in order of attaching."""


class Standings:
    """The workers of one scheduler, by number.

    Attributes:
        current: by number.
        blocked: numbers of workers whose waiting sequences, if they have any, could not start when they were tried.
    """

    def __init__(self) -> None:
        self.blocked: set[int] = set()
        self.current: dict[int, Standing] = {}
        self._heap: list[Standing] = []
        self._changed: set[int] = set()  # and not in the heap yet
        self._next_number = 0

    def enter(self) -> int:
        """Take in a worker without anything; return its number."""
        number = self._next_number
        self._next_number += 1
        self.current[number] = (0, 0, number)
        self._changed.add(number)
        return number

    def leave(self, number: int) -> None:
        """Forget a worker; noting it has no effect then."""
        self.current.pop(number, None)
        self.blocked.discard(number)
        self._changed.discard(number)

    def note(self, number: int, num_waiting: int, num_running: int, *, is_blocked: bool) -> None:
        """Take note of how a worker stands now."""
        current = self.current
        before = current.get(number)
        if before is None:
            return
        standing = (num_waiting, num_running, number)
        if before != standing:
            current[number] = standing
            self._changed.add(number)
        if is_blocked:
            self.blocked.add(number)
        else:
            self.blocked.discard(number)

    def first(self, suits: Callable[[int], bool]) -> Standing | None:
        """Return the least standing of a worker that suits; None: there is none.

        Cost: a logarithm for each that comes before it.
        """
        current = self.current
        heap = self._in_order()
        passed: list[Standing] = []
        found: Standing | None = None
        while heap:
            standing = heap[0]
            if current.get(standing[2]) != standing or (passed and passed[-1] == standing):
                heappop(heap)
            elif suits(standing[2]):
                found = standing
                break
            else:
                passed.append(heappop(heap))
        for standing in passed:
            heappush(heap, standing)
        return found

    def _in_order(self) -> list[Standing]:
        heap, current, changed = self._heap, self.current, self._changed
        if len(heap) + len(changed) > 4 * len(current) + 64:
            self._heap = heap = list(current.values())
            heapify(heap)
        else:
            for number in changed:
                standing = current.get(number)
                if standing is not None:
                    heappush(heap, standing)
        changed.clear()
        return heap
