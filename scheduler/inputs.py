"""Inputs of one worker: requests, cancels, recalls, adapters to load or retire; which take effect late; the journal.

The rule is in `effects.py`. An input that comes while a plan runs and may change it should take effect at the next
boundary; one that takes effect later is counted, and recorded with the boundary at which it did.
"""

from lorrery.scheduler.core.cluster_events import GaveBack, Placed
from lorrery.scheduler.core.plan import Cancelled, Failed, Finished, Idle, Plan
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.effects import NOBODY, Effects
from lorrery.scheduler.journal import WorkerJournal
from lorrery.scheduler.metrics import SchedulerMetrics


class Inputs:
    """See the module.

    Args:
        metrics: count late inputs.
        journal: of the worker; None: there is no journal.

    Attributes:
        effects: inputs that wait for their boundary.
    """

    def __init__(self, metrics: SchedulerMetrics, journal: WorkerJournal | None) -> None:
        self.effects = Effects()
        self._metrics, self._journal = metrics, journal
        self._num = 0

    def placed(self, event: Placed, at_ps: int, *, expected: bool, lost: bool) -> None:
        """Record a request that the core has given this worker.

        Args:
            event: the core's.
            at_ps: its stamp.
            expected: whether it should take effect at the next boundary.
            lost: whether the worker's stream is about to end, so that there will be no boundary.
        """
        if self._journal is not None:
            overdue = self._overdue(at_ps, expected, lost)
            self._journal.placed(
                self._num, event.sequence.handle, at_ps, event.figures, event.moved_from, overdue=overdue
            )
        self._take(event.sequence.handle, at_ps, expected and not lost)

    def withdrawn(self, sequence: Sequence, at_ps: int, *, lost: bool) -> None:
        """Record a request of this worker that has been cancelled."""
        if self._journal is not None:
            self._journal.cancelled(self._num, sequence, at_ps, overdue=self._overdue(at_ps, True, lost))
        self._take(sequence.handle, at_ps, not lost)

    def recalled(self, handle: int, to: str, at_ps: int, *, lost: bool) -> None:
        """Record a waiting request of this worker that is to move to another."""
        if self._journal is not None:
            self._journal.recalled(self._num, handle, to, at_ps, overdue=self._overdue(at_ps, True, lost))
        self._take(handle, at_ps, not lost)

    def retired(self, adapter_key: str, at_ps: int, *, lost: bool) -> None:
        """Record an adapter to be released once no sequence has it."""
        if self._journal is not None:
            self._journal.retired(self._num, adapter_key, at_ps, overdue=self._overdue(at_ps, True, lost))
        self._take(NOBODY, at_ps, not lost)

    def load(self, adapter: Adapter, at_ps: int, *, lost: bool) -> None:
        """Record an adapter to be loaded on an operator's request."""
        if self._journal is not None:
            self._journal.load(self._num, adapter, at_ps, overdue=self._overdue(at_ps, True, lost))
        self._take(NOBODY, at_ps, not lost)

    def decided(self, decision: Plan | Idle, at_ps: int) -> None:
        """Record a decision; count and record the inputs that took effect with it too late."""
        for event in self.effects.planned(at_ps):
            self._metrics.late_interrupts.inc()
            if self._journal is not None:
                self._journal.late(event, at_ps)
        if self._journal is not None:
            self._journal.decided(decision, at_ps)

    def lost(self, gave_back: GaveBack, at_ps: int) -> None:
        """Record what the core has taken back from a worker that is gone."""
        if self._journal is not None:
            for event in self.effects.awaited:
                if event.overdue:
                    self._journal.late(event, None)
            self._journal.gave_back("lost", at_ps, gave_back.sequences, gave_back.events)

    def drained(self, gave_back: GaveBack, at_ps: int) -> None:
        """Record what the core has taken back while the rest runs on."""
        gone = {event.sequence.handle for event in gave_back.events if isinstance(event, Cancelled | Failed | Finished)}
        never = self.effects.withdrawn(gone | {sequence.handle for sequence in gave_back.sequences})
        if self._journal is not None:
            for event in never:
                self._journal.late(event, None)
            self._journal.gave_back("drained", at_ps, gave_back.sequences, gave_back.events)

    def flush_journal(self) -> None:
        """Flush the gathered steps to the journal, unless an event should have prevented some of them.

        A reader of a journal that ended there would not know that the event is late.
        """
        if self._journal is not None and not self.effects.any_overdue:
            self._journal.flush()

    def _overdue(self, at_ps: int, expected: bool, lost: bool) -> bool:
        """Return whether the boundary at which an input should take effect has passed, or there will be none."""
        return lost or (expected and self.effects.passed(at_ps))

    def _take(self, handle: int, at_ps: int, awaited: bool) -> None:
        number, self._num = self._num, self._num + 1
        if awaited:
            self.effects.expect(number, handle, at_ps)
