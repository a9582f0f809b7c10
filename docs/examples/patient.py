"""Shortest prompt first, except that a request which has waited for long enough goes first."""

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.queues.base import ListedQueue
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class Patient(ListedQueue):
    """A queue; `ListedQueue` has the rest of it."""

    def __init__(self, patience_seconds: float = 20.0) -> None:
        super().__init__()
        self.patience_ps = round(patience_seconds * 1e12)

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try the waiting requests in the pass, and take out those that it admitted."""

        def urgency(waiting: Sequence) -> tuple[bool, int]:
            return at_ps - waiting.arrived_ps < self.patience_ps, waiting.input_tokens

        for sequence in sorted(self, key=urgency):
            if not admission.admit(sequence):
                break
        self._waiting.remove_all(admission.admitted)
        return []
