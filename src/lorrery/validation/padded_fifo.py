"""The queue of Vidur's vLLM scheduler: first come first served, with padded prefills bounded (`vidur`)."""

from lorrery.scheduler.core.admission import AdmissionPass, Blocked
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import steps_until_admissible
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class PaddedFifo(Fifo):
    """First come first served; a prefill holds as many prompts as fit when padded to the longest.

    Args:
        max_tokens: limit on the prompts of a prefill times the tokens of the longest.
    """

    def __init__(self, max_tokens: int = 4096) -> None:
        super().__init__()
        self._max_tokens = max_tokens

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try sequences from the head, until one is refused or would make the padded prefill too large."""
        self._blocked = None
        longest = 0
        for sequence in self._waiting:
            longest = max(longest, sequence.input_tokens)
            if longest * (len(admission.admitted) + 1) > self._max_tokens:
                self._blocked = sequence, Blocked.PROMPT
                break
            if not admission.admit(sequence):
                self._blocked = admission.refused
                break
        if admission.admitted:
            self._waiting.remove_all(admission.admitted)
        return []

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return after how many decode steps the refused sequence may fit; steps do not change the padding."""
        return steps_until_admissible(self._blocked, running, memory, limit)
