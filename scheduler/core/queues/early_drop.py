"""Early drop by service level: drop requests whose deadline has passed, and under overload serve the newest first.

S-LoRA's `abort` (slora/server/router/abort_req_queue.py, commit c1ddf48; its paper's early abort). A request that has
waited so long that its first token would come later than the service level (6 s, of which half a second is reserved for
the prefill) is dropped. If requests arrive faster than they are served, the pass goes from the newest backwards, since
the oldest will miss their deadline anyway; otherwise from the oldest. It ends at the first refusal.

Overload is judged by two moving averages, each 0.7 x the latest + 0.3 x the old: requests that arrived since the last
batch was formed, and requests in a batch. There is overload if the former is not less.

`strict` keeps the original's:

* `rate_per_try`: the average of arrivals takes a sample at every try, not at every batch, so the same arrivals count
  again and again, and a failed try changes the next.
* `rate_of_listed`: a sample is the growth of the list, so drops and cancels count as negative arrivals; averages are
  truncated to integers, towards zero.
* `cancelled_are_dropped`: a cancelled request stays listed until a batch forms or its deadline passes, and is then
  reported as dropped (a replica has reported the cancel, and does not report it again).
* `requeued_are_dropped`: a request that lost its worker meets the same deadline.

In the default a sample is counted arrivals, one is taken per batch, averages are integers in thousandths, and a request
that was in a batch before (requeued, preempted) is never dropped.

Cost of a pass: one test more than sequences enter, and what is dropped; strict: O(cancelled) more.
"""

from collections.abc import Iterator
from typing import Protocol

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import ListedQueue, steps_until_admissible
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence

FIRST_TOKEN_SLO_PS = 6_000_000_000_000
"""S-LoRA's service level."""
PREFILL_ALLOWANCE_PS = 500_000_000_000
"""S-LoRA's guess of the time between admission and the first token."""


class EarlyDrop(ListedQueue):
    """Drop late requests; newest first under overload. In queue order the newest is the first, as in S-LoRA.

    Args:
        first_token_slo_ps: a request whose first token would come this late is dropped; > PREFILL_ALLOWANCE_PS.
        strict: keep S-LoRA's bugs.
    """

    def __init__(self, first_token_slo_ps: int = FIRST_TOKEN_SLO_PS, *, strict: bool = False) -> None:
        super().__init__(strict=strict)
        self.longest_wait_ps = first_token_slo_ps - PREFILL_ALLOWANCE_PS
        self.overload: Overload = SloraOverload() if strict else MeanOverload()

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(self._waiting)

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Add a sequence in front of those that arrived before it."""
        super().append(sequence, at_ps)
        self.overload.arrived()

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Drop late sequences, then try the rest; return the dropped ones, newest first."""
        self._blocked = None
        overloaded = self.overload.judge(len(self))
        dropped = self._late(at_ps)
        self._waiting.remove_all(dropped)
        met: list[Sequence] = []
        for sequence in reversed(self._waiting) if overloaded else self._waiting:
            if sequence.aborted:
                met.append(sequence)
            elif not admission.admit(sequence):
                self._blocked = admission.refused
                break
        if admission.admitted:
            self._waiting.remove_all((*admission.admitted, *met))
            self.overload.formed(len(admission.admitted), len(self))
        return dropped[::-1]

    def _late(self, at_ps: int) -> list[Sequence]:
        late: list[Sequence] = []
        for sequence in self._waiting:
            if at_ps - sequence.arrived_ps < self.longest_wait_ps:
                break
            if self._may_drop(sequence):
                late.append(sequence)
        return late

    def _may_drop(self, sequence: Sequence) -> bool:
        return self.strict or not sequence.num_requeues

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return after how many decode steps the sequence that ended the pass may fit; 1 if tries change the rate."""
        if not self.overload.settled(len(self)):
            return 1
        return steps_until_admissible(self._blocked, running, memory, limit)

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Return the next deadline."""
        deadlines = (s.arrived_ps + self.longest_wait_ps for s in self._waiting if self._may_drop(s))
        return next((deadline for deadline in deadlines if deadline > at_ps), None)

    def at_rest(self) -> bool:
        """Return whether nothing waits, cancelled ones included, and a try would not change the rate."""
        return not len(self) and self.overload.settled(0)


class Overload(Protocol):
    """Decides whether requests arrive faster than they are served."""

    def arrived(self) -> None:
        """Record an arrival."""
        ...

    def judge(self, num_listed: int) -> bool:
        """Return whether there is overload, at a try with this many listed, late ones included."""
        ...

    def formed(self, num_admitted: int, num_left: int) -> None:
        """Record a formed batch, and how many sequences are left."""
        ...

    def settled(self, num_listed: int) -> bool:
        """Return whether one more try would change nothing."""
        ...


class SloraOverload:
    """S-LoRA's averages, with its names and its doubles; they start as its do.

    Attributes:
        req_rate: `apprx_req_rate`.
        batch_size: `apprx_bs`.
        last_req_num: how many were left when the last batch was formed.
    """

    def __init__(self) -> None:
        self.req_rate = 1
        self.batch_size = 1
        self.last_req_num = 0

    def arrived(self) -> None:
        """Ignore it: only the length of the list counts."""

    def judge(self, num_listed: int) -> bool:
        """Take a sample, and return whether there is overload."""
        self.req_rate = self._next_rate(num_listed)
        return self.req_rate >= self.batch_size

    def _next_rate(self, num_listed: int) -> int:
        return int(0.7 * (num_listed - self.last_req_num) + 0.3 * self.req_rate)

    def formed(self, num_admitted: int, num_left: int) -> None:
        """Take a sample of batch sizes."""
        self.last_req_num = num_left
        self.batch_size = max(int(0.7 * num_admitted + 0.3 * self.batch_size), 1)

    def settled(self, num_listed: int) -> bool:
        """Return whether the rate is at its fixed point."""
        return self._next_rate(num_listed) == self.req_rate


class MeanOverload:
    """Averages of counted arrivals and batch sizes, one sample per batch, in thousandths; they start at one."""

    def __init__(self) -> None:
        self._num_arrived = 0
        self._arrivals = self._batch_size = 1000

    def arrived(self) -> None:
        """Count an arrival."""
        self._num_arrived += 1

    def judge(self, num_listed: int) -> bool:
        """Return whether there is overload, as if a batch were formed now."""
        return self._mean(self._num_arrived, self._arrivals) >= self._batch_size

    def formed(self, num_admitted: int, num_left: int) -> None:
        """Take both samples."""
        self._arrivals = self._mean(self._num_arrived, self._arrivals)
        self._batch_size = self._mean(num_admitted, self._batch_size)
        self._num_arrived = 0

    @staticmethod
    def _mean(number: int, old: int) -> int:
        return (7000 * number + 3 * old) // 10

    def settled(self, num_listed: int) -> bool:
        """Return True: a try changes nothing."""
        return True
