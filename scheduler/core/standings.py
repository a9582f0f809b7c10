"""Number of waiting and running sequences at each worker of a scheduler, ordered, without a scan of all.

Each member reports possible changes (`Member`), so the workers that cannot start their waiting sequences are known at
once. The order is needed only when there is such a worker: then workers changed since go into a heap, for a logarithm
each. Stale heap entries are skipped when they reach its top.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

Standing = tuple[int, int, int]
"""Waiting sequences at a worker, running sequences there, and its number, in order of attaching."""


class Standings:
    """The workers of one scheduler, by number.

    Attributes:
        current: the standing of each worker.
        blocked: numbers of workers whose waiting sequences, if any, could not start when tried.
    """

    def __init__(self) -> None:
        self.blocked: set[int] = set()
        self.current: dict[int, Standing] = {}
        self._heap: list[Standing] = []
        self._changed: set[int] = set()  # not in the heap yet
        self._next_number = 0

    def enter(self) -> int:
        """Add an empty worker; return its number."""
        number = self._next_number
        self._next_number += 1
        self.current[number] = (0, 0, number)
        self._changed.add(number)
        return number

    def leave(self, number: int) -> None:
        """Remove a worker; `note` has no effect for it afterwards."""
        self.current.pop(number, None)
        self.blocked.discard(number)
        self._changed.discard(number)

    def note(self, number: int, num_waiting: int, num_running: int, *, is_blocked: bool) -> None:
        """Record a worker's current standing."""
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

        Cost: a logarithm for each worker skipped before it.
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
