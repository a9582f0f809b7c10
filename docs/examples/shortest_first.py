"""Shortest prompt first: whoever fits enters, in order of prompt length; the first refusal ends the walk."""

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.queues.base import ListedQueue
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class ShortestFirst(ListedQueue):
    """A queue; `ListedQueue` has the rest of it."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try the waiting sequences in the pass, and take out those that it admitted."""
        for sequence in sorted(self, key=lambda waiting: waiting.input_tokens):
            if not admission.admit(sequence):
                break
        self._blocked = admission.refused
        self._waiting.remove_all(admission.admitted)
        return []
