"""The faults that one worker follows by itself: those it was sent, and those it has acknowledged.

A worker reports from when the faults it was sent hold, in the order in which they were sent.
"""

from collections import deque

from lorrery.scheduler import wire_workers
from lorrery.scheduler.faults import ClusterFaults
from lorrery.scheduler.journal import WorkerJournal
from lorrery.scheduler.messages import ProtocolError
from lorrery.service.clocks import DeviceClock
from lorrery.service.faults.kinds import parse_fault

MAX_UNTAKEN = 64
"""Most operator calls with faults of one worker that may be unacknowledged."""


class ToldFaults:
    """See the module.

    Args:
        worker_id: of the worker.
        clock: device clock.
        faults: of the cluster; counts each fault that the worker follows.
        journal: of the worker; None: there is no journal.
    """

    def __init__(
        self, worker_id: str, clock: DeviceClock, faults: ClusterFaults, journal: WorkerJournal | None
    ) -> None:
        self._worker_id = worker_id
        self._clock, self._faults, self._journal = clock, faults, journal
        self._told = False
        self._untaken: deque[tuple[list[str], bool]] = deque()

    def tell(self, rules: list[str], *, add: bool, from_ps: int | None) -> wire_workers.ToWorker | None:
        """Return the message for the worker; None: there is nothing to send.

        Args:
            rules: a text each.
            add: whether those that it was sent before stay active.
            from_ps: start of their times; None: when the worker takes them.

        Raises:
            ProtocolError: it has left too many unacknowledged.
        """
        if len(self._untaken) == MAX_UNTAKEN:
            raise ProtocolError(f"the worker has not confirmed the faults of {MAX_UNTAKEN} calls")
        if not rules and (add or not self._told):
            return None
        self._told = True
        self._untaken.append((rules, add))
        return wire_workers.worker_faults(rules, add=add, from_ps=from_ps, sent_ps=self._clock.now_ps())

    def taken(self, from_ps: int, earliest_ps: int, latest_ps: int) -> None:
        """Record from when the faults that the worker was sent hold.

        Args:
            from_ps: as the worker reports.
            earliest_ps: the end of its last step.
            latest_ps: upper bound on a valid time.

        Raises:
            ProtocolError: it was sent none, or the time is not in these bounds.
        """
        if not self._untaken:
            raise ProtocolError("the worker confirms faults that it was not sent")
        if not earliest_ps <= from_ps <= latest_ps:
            raise ProtocolError(
                f"the worker confirms faults from {from_ps} ps; its last step ended at {earliest_ps} ps"
            )
        rules, add = self._untaken.popleft()
        if self._journal is not None:
            self._journal.faults(rules, from_ps, add=add)
        for rule in rules:
            self._faults.taken(parse_fault(rule), self._worker_id)
