"""A faulty policy: first come first served, but it raises at prompts of one length."""

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.queues.base import ListedQueue
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence

PROMPT_TOKENS = 13


class RaisingPolicy(ListedQueue):
    """The queue."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Test from the head; raise at a prompt of `PROMPT_TOKENS`."""
        for sequence in self:
            if sequence.prompt_tokens == PROMPT_TOKENS:
                raise ArithmeticError("a policy's own fault")
            if not admission.admit(sequence):
                break
        self._waiting.remove_all(admission.admitted)
        return []
