"""The same, and it says for how long its answers hold."""

from patient import Patient

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import steps_until_admissible
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class FastPatient(Patient):
    """Asked again when memory may have room, or when a request becomes urgent."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Keep what the pass refused."""
        dropped = super().admit(admission, running, at_ps)
        self._blocked = admission.refused
        return dropped

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return after how many decode steps the request that ended the pass may fit."""
        return steps_until_admissible(self._blocked, running, memory, limit)

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Return when the next request will have waited for long enough."""
        urgent = (waiting.arrived_ps + self.patience_ps for waiting in self)
        return min((when for when in urgent if when > at_ps), default=None)
