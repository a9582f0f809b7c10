"""The faults that one worker follows by itself: what an operator has told it, and what of that it has taken.

A worker says since when what it was told holds, in the order in which it was told.
"""

from collections import deque

from lorrery.chassis.clock import DeviceClock
from lorrery.chassis.faults import parse_fault
from lorrery.scheduler import wire_workers
from lorrery.scheduler.faults import ClusterFaults
from lorrery.scheduler.journal import WorkerJournal
from lorrery.scheduler.messages import ProtocolError

MAX_UNTAKEN = 64
"""An operator's calls with faults of a worker that it may leave without an answer."""


class ToldFaults:
    """See the module.

    Args:
        worker_id: whose.
        clock: of the scheduler.
        faults: of the cluster; told of each that a worker follows.
        journal: of the worker; None: nobody keeps one.
    """

    def __init__(
        self, worker_id: str, clock: DeviceClock, faults: ClusterFaults, journal: WorkerJournal | None
    ) -> None:
        self._worker_id = worker_id
        self._clock, self._faults, self._journal = clock, faults, journal
        self._told = False
        self._untaken: deque[tuple[list[str], bool]] = deque()

    def tell(self, rules: list[str], *, add: bool, from_ps: int | None) -> wire_workers.ToWorker | None:
        """Return what to tell the worker; None: nothing.

        Args:
            rules: a text each.
            add: whether those that it was told before go on.
            from_ps: since when their times count; None: since the worker takes them.

        Raises:
            ProtocolError: it has left too many without an answer.
        """
        if len(self._untaken) == MAX_UNTAKEN:
            raise ProtocolError(f"the worker has not taken the faults of {MAX_UNTAKEN} calls")
        if not rules and (add or not self._told):
            return None
        self._told = True
        self._untaken.append((rules, add))
        return wire_workers.worker_faults(rules, add=add, from_ps=from_ps, sent_ps=self._clock.now_ps())

    def taken(self, from_ps: int, earliest_ps: int, latest_ps: int) -> None:
        """Take note of since when the faults that the worker was told hold.

        Args:
            from_ps: what it says.
            earliest_ps: the end of its last step.
            latest_ps: what has not come.

        Raises:
            ProtocolError: it was told none, or they hold since what cannot be.
        """
        if not self._untaken:
            raise ProtocolError("the worker takes faults that it was not told")
        if not earliest_ps <= from_ps <= latest_ps:
            raise ProtocolError(f"the worker takes faults from {from_ps} ps on; its last step ended {earliest_ps}")
        rules, add = self._untaken.popleft()
        if self._journal is not None:
            self._journal.faults(rules, from_ps, add=add)
        for rule in rules:
            self._faults.taken(parse_fault(rule), self._worker_id)
