"""Faults on request that a worker follows by itself: it is slow, begins no step, or is lost and its process is not."""

from collections.abc import Iterable

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.fault_rules import RuleBook
from lorrery.chassis.faults import WORKER_LOSS, Fault, parse_fault
from lorrery.settings import Settings
from lorrery.worker.build import spells_of
from lorrery.worker.device.slow import Spells


class WorkerFaults:
    """The faults of one worker, from attaching on.

    Args:
        settings: of the cluster; some of its faults may be this worker's.
        name: the worker's.
        from_ps: since when the times of the settings' faults count.
    """

    def __init__(self, settings: Settings, name: str, from_ps: int) -> None:
        self._name = name
        self._book = RuleBook()
        self._book.plan(settings.planned_faults(), from_ps)
        # One that names a process of several is not among them: whoever runs the process kills it.
        asked = map(parse_fault, settings.faults)
        losses = [fault for fault in asked if (fault.kind, fault.worker) == (WORKER_LOSS, name)]
        self._losses = [fault.begun_at(from_ps) for fault in losses]

    @property
    def spells(self) -> Spells:
        """When it is slow or frozen."""
        return spells_of(self._book.sets, self._name)

    def next_loss(self, at_ps: int) -> Fault | None:
        """Return the settings' first loss of this worker that is not over at a time, with its times on that clock."""
        losses = [fault for fault in self._losses if fault.until_ps > at_ps]
        return min(losses, key=lambda fault: fault.at_ps, default=None)

    def take(self, rules: Iterable[str], from_ps: int, *, add: bool) -> Spells:
        """Take an operator's faults from a time on; return when it is slow or frozen.

        Args:
            rules: a text each.
            from_ps: when their times begin to count.
            add: whether those that it was told before go on.

        Raises:
            ValueError: one is none.
        """
        try:
            faults = [parse_fault(rule) for rule in rules]
        except SettingsError as error:
            raise ValueError(str(error)) from None
        self._book.take(faults, from_ps, add=add)
        return self.spells
