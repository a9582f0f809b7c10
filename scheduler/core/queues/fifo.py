"""First come first served with head-of-line blocking; and the same by priority.

S-LoRA's request queue (slora/server/router/req_queue.py, commit c1ddf48), and vLLM's order. The pass goes from the head
and ends at the first refused sequence, except those that wait only for their adapter: others overtake them, within the
bound of `AdmissionPass`.

`strict` keeps what S-LoRA does with cancelled requests (named `cancelled_stay_listed` in the docs): a waiting one is
skipped in the pass but stays listed until a batch forms, so a queue of cancelled requests only is never swept. Without
it they leave at once.

Cost of a pass: one test more than sequences enter or are passed over; with `by_adapter`, than sequences enter or
adapters are refused. It does not grow with the queue.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import ListedQueue, steps_until_admissible
from lorrery.scheduler.core.queues.waiting import WaitingByAdapter, WaitingList
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Fifo(ListedQueue):
    """First come first served.

    Args:
        strict: keep S-LoRA's handling of cancelled requests.
        by_adapter: any number of sequences may overtake one that waits for its adapter. Then a pass tries one sequence
            of each adapter that is refused, instead of all.
    """

    def __init__(self, *, strict: bool = False, by_adapter: bool = False) -> None:
        super().__init__(strict=strict)
        self._by_adapter = WaitingByAdapter() if by_adapter else None
        if self._by_adapter is not None:
            self._waiting = self._by_adapter

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try from the head. Cost: one test more than sequences enter or are passed over."""
        cancelled: list[Sequence] = []
        self._blocked = None
        if self._by_adapter is not None:
            return self._admit_by_adapter(self._by_adapter, admission)
        for sequence in self._waiting:
            if sequence.aborted:
                cancelled.append(sequence)
            elif not admission.admit(sequence) and not admission.pass_over():
                self._blocked = admission.refused
                break
        if admission.admitted:
            # S-LoRA removes as many from the front as it has seen: admitted ones and cancelled ones among them.
            self._waiting.remove_all((*admission.admitted, *cancelled))
        return []

    def _admit_by_adapter(self, waiting: WaitingByAdapter, admission: AdmissionPass) -> list[Sequence]:
        """Do the same. What one sequence lacks an adapter for, all others of that adapter lack it for too."""
        turns = waiting.merged(list(waiting.adapters))
        while (sequence := turns.first) is not None:
            if admission.admit(sequence):
                turns.take()
            elif admission.pass_over():
                turns.drop_adapter()
            else:
                self._blocked = admission.refused
                break
        if admission.admitted:
            waiting.remove_all(admission.admitted)
        return []

    def put_first(self, sequence: Sequence, at_ps: int) -> None:
        """Add a preempted sequence before all others, those too that were passed over (vLLM)."""
        self._waiting.put_first(sequence)

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return after how many decode steps the sequence that ended the pass may fit."""
        return steps_until_admissible(self._blocked, running, memory, limit)

    def arrivals_matter(self) -> bool:
        """Return whether an arrival could be admitted: only if no sequence ended the last pass."""
        return self._blocked is None or self.at_rest()


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
    """By priority, then by arrival: vLLM's `--scheduling-policy priority` (vllm/v1/core/sched/request_queue.py).

    A lower number is earlier. Otherwise as `Fifo`: the pass ends at the first refused sequence, except those that wait
    only for their adapter. A waiting sequence never preempts a running one for a seat. A preempted sequence has no
    other place than before.

    Cost of a pass: as `Fifo`. An arrival costs O(log n), and a move of a few words.
    """

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
