"""By priority, then by arrival: vLLM's `--scheduling-policy priority` (vllm/v1/core/sched/request_queue.py).

A lower number is earlier. Otherwise as `fifo`: the pass ends at the first refused sequence, except those that wait only
for their adapter. A waiting sequence never preempts a running one for a seat. A preempted sequence has no other place
than before.

Cost of a pass: as `fifo`. An arrival costs O(log n), and a move of a few words.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.queues.waiting import WaitingList
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr

_Key = tuple[int, int, int]


class WaitingByPriority(WaitingList):
    """Sequences in order of priority, then first arrival, then handle."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[_Key] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter([self.by_handle[handle] for _, _, handle in self._keys])

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed([self.by_handle[handle] for _, _, handle in self._keys])

    def append(self, sequence: Sequence) -> None:
        """Add at its place."""
        self.by_handle[sequence.handle] = sequence
        insort(self._keys, _key(sequence))
        self._first, self._front_length = [], -1

    def put_first(self, sequence: Sequence) -> None:
        """Add at its place, which is no other for having been preempted."""
        self.append(sequence)

    def _leaves(self, sequence: Sequence) -> None:
        super()._leaves(sequence)
        del self._keys[bisect_left(self._keys, _key(sequence))]

    def clear(self) -> list[Sequence]:
        """Remove and return all, in order."""
        sequences = super().clear()
        self._keys.clear()
        return sequences


@mypyc_attr(allow_interpreted_subclasses=True)
class Priority(Fifo):
    """Lowest `Sequence.priority` first."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = WaitingByPriority()

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return after how many decode steps the sequence that ended the pass may fit."""
        return super().holds_for(running, memory, limit)

    def arrivals_matter(self) -> bool:
        """Return True: an arrival may be ahead of the sequence that ended the last pass."""
        return True


def _key(sequence: Sequence) -> _Key:
    return sequence.priority, sequence.arrived_ps, sequence.handle
