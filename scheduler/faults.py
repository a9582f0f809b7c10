"""Faults on request that a scheduler lets happen: to the loads of its workers, and to whoever may attach.

What makes a worker slow, or freezes it, is its own doing; a worker that was lost frozen does not come back before it
thaws, as one whose GPU hangs does not. A worker that settings lose is killed by whoever runs it.
"""

from prometheus_client import Counter

from lorrery.chassis.errors import InjectedFault
from lorrery.chassis.fault_rules import LoadRules, RuleBook
from lorrery.chassis.faults import FREEZE_WORKER, Fault
from lorrery.scheduler.watch import Loss
from lorrery.settings import Settings


class ClusterFaults:
    """The faults of one scheduler.

    Args:
        settings: of the cluster.
        happened: counts them, by kind.
    """

    def __init__(self, settings: Settings, happened: Counter) -> None:
        self.book = RuleBook()
        self._settings = settings
        self._happened = happened
        self._frozen_out: set[str] = set()  # workers, of rules only

    @property
    def from_ps(self) -> int:
        """Since when the times of the settings' faults count."""
        return 0 if self.book.planned is None else self.book.planned.from_ps

    def begin(self, at_ps: int) -> None:
        """Let the times of the settings' faults count from now, unless they do already."""
        self.book.plan(self._settings.planned_faults(), at_ps)

    def load_rules(self, worker_id: str) -> LoadRules:
        """Return what goes wrong with the loads of a worker that attaches."""
        return LoadRules(self.book, worker_id, self._count)

    def _count(self, fault: Fault) -> None:
        self._happened.labels(fault.kind).inc()

    def given_up(self, worker_id: str, loss: Loss, at_ps: int) -> None:
        """Take note of a worker whose stream is to end."""
        fault = self.book.going_on(FREEZE_WORKER, worker_id, at_ps)
        if loss is Loss.STALLED and fault is not None:
            self._frozen_out.add(worker_id)
            self._count(fault)

    def check_attach(self, worker_id: str, at_ps: int) -> None:
        """Let a worker attach, or not.

        Raises:
            InjectedFault: a fault keeps it away.
        """
        fault = self.book.going_on(FREEZE_WORKER, worker_id, at_ps) if worker_id in self._frozen_out else None
        if fault is not None:
            raise InjectedFault(fault.text, "UNAVAILABLE")
        self._frozen_out.discard(worker_id)
