"""Injected faults that a worker applies itself: slow steps, frozen steps, and the loss of one GPU of a process."""

from collections.abc import Iterable

from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import WORKER_LOSS, Fault, parse_fault
from lorrery.service.faults.rules import RuleBook
from lorrery.service.settings.cluster import Settings
from lorrery.worker.build import spells_of
from lorrery.worker.device.steptime import Spells


class WorkerFaults:
    """The faults of one worker, from its attachment on.

    Args:
        settings: of the cluster; some of its faults may name this worker.
        name: name of the worker.
        from_ps: origin of the times in the settings' faults.
    """

    def __init__(self, settings: Settings, name: str, from_ps: int) -> None:
        self._name = name
        self._book = RuleBook()
        self._book.plan(settings.planned_faults(), from_ps)
        # A loss that names a whole process is not among them: whatever runs the process kills it.
        asked = map(parse_fault, settings.faults)
        losses = [fault for fault in asked if (fault.kind, fault.worker) == (WORKER_LOSS, name)]
        self._losses = [fault.begun_at(from_ps) for fault in losses]

    @property
    def spells(self) -> Spells:
        """When the worker is slow or frozen."""
        return spells_of(self._book.sets, self._name)

    def next_loss(self, at_ps: int) -> Fault | None:
        """Return the settings' first loss of this worker that is not over at `at_ps`, in device time; None: no more."""
        losses = [fault for fault in self._losses if fault.until_ps > at_ps]
        return min(losses, key=lambda fault: fault.at_ps, default=None)

    def take(self, rules: Iterable[str], from_ps: int, *, add: bool) -> Spells:
        """Apply an operator's faults from `from_ps` on; return when the worker is slow or frozen.

        Args:
            rules: one fault each, as text.
            from_ps: origin of the times in the rules.
            add: whether the faults set before stay in force.

        Raises:
            ValueError: a rule cannot be parsed.
        """
        try:
            faults = [parse_fault(rule) for rule in rules]
        except SettingsError as error:
            raise ValueError(str(error)) from None
        self._book.take(faults, from_ps, add=add)
        return self.spells
