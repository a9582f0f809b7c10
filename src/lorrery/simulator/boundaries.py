"""Finds the worker with the earliest next boundary.

The workers are the leaves of a tournament tree: each inner node holds the worker below it with the earliest boundary,
and the root the earliest of all. When a worker's boundary changes, only the nodes above it are updated, up to the first
whose result does not change.

Of boundaries at one time, the first in order of attaching comes first.

Cost: one comparison for each level that changes, at most the logarithm of the number of workers; nothing to clean up.
"""

from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER


class Boundaries:
    """The next boundary of each worker, stored in the worker (`SimulatedWorker.end_ps`).

    Args:
        workers: in order of attaching.

    Attributes:
        next_ps: the earliest boundary of any worker; `NEVER`: there is none.
        first: the worker with that boundary; undefined if there is none.
    """

    def __init__(self, workers: list[SimulatedWorker]) -> None:
        self.next_ps = NEVER
        self.first: SimulatedWorker
        self._num = 0
        self._first: list[SimulatedWorker] = []  # per node: node i has the children 2 i and 2 i + 1, the root is 1
        self.enter(workers)

    def enter(self, workers: list[SimulatedWorker]) -> None:
        """Replace the set of workers. Linear in their number.

        Args:
            workers: in order of attaching.
        """
        self._num = len(workers)
        self._first = [*workers, *workers]  # the leaves are the second half
        for node in range(len(workers) - 1, 0, -1):
            self._first[node] = _earlier(self._first[2 * node], self._first[2 * node + 1])
        self.next_ps = NEVER
        if workers:
            self.first = self._first[1]
            self.next_ps = self.first.end_ps

    def move(self, worker: SimulatedWorker, at_ps: int) -> None:
        """Change a worker's next boundary; `NEVER`: it has none."""
        worker.end_ps = at_ps
        first, node = self._first, (self._num + worker.order) >> 1
        while node:
            before, earlier = first[node], _earlier(first[2 * node], first[2 * node + 1])
            if earlier is before and earlier is not worker:
                return  # it was not the first here, and is not now
            first[node] = earlier
            node >>= 1
        self.first = first[1]
        self.next_ps = self.first.end_ps


def _earlier(one: SimulatedWorker, other: SimulatedWorker) -> SimulatedWorker:
    if one.end_ps != other.end_ps:
        return one if one.end_ps < other.end_ps else other
    return one if one.order < other.order else other
