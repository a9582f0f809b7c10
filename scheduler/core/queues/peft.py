"""One adapter at a time, as if its weights were merged into the base model's.

S-LoRA's `peft` (slora/server/router/peft_req_queue.py, commit c1ddf48), its model of HuggingFace PEFT: a batch serves
one adapter (the base model is one too), and the next adapter has its turn when the batch has drained.

The batch's adapter, or with nothing running that of the request that has waited longest, is walked in order of arrival
up to the first refusal. At most `MAX_OVERTAKES` sequences overtake the one that has waited longest; then the batch
drains, and that one's adapter is next.

`strict` keeps the original's:

* `counts_others`: instead of that bound, the batch drains if more than 30 requests of other adapters are listed before
  the first of its own. A single request of another adapter may starve.
* `cancelled_stay_listed`: a cancelled request is never removed; it counts among the 30, and at the head of the list it
  chooses the adapter, for which a batch may then never form.

Cost of a pass: one test more than sequences enter; it does not grow with the queue.
"""

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import ListedQueue, steps_until_admissible
from lorrery.scheduler.core.queues.by_adapter import WaitingByAdapter, adapter_key
from lorrery.scheduler.core.queues.patience import MAX_OVERTAKES, Patience
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class Peft(ListedQueue):
    """One adapter at a time.

    Args:
        strict: keep S-LoRA's bugs.
        max_overtakes: how many sequences may overtake the one that has waited longest.
    """

    def __init__(self, *, strict: bool = False, max_overtakes: int = MAX_OVERTAKES) -> None:
        super().__init__(strict=strict)
        self._waiting = self._by_adapter = WaitingByAdapter()
        self._patience = Patience(max_overtakes)

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try the requests of one adapter."""
        self._blocked = None
        head = self._waiting.first
        if head is None:
            return []
        first_running = running.first
        key = adapter_key(head if first_running is None else first_running)
        if self.strict and not self._few_others(key):
            return []
        left = len(self) if self.strict else self._patience.left(head)
        for sequence in self._by_adapter.of(key):
            if sequence.aborted:
                continue
            if not left and sequence is not head and head not in admission.admitted:
                break
            if not admission.admit(sequence):
                self._blocked = admission.refused
                break
            left -= left > 0
        self._patience.note(head, admission.admitted)
        self._waiting.remove_all(admission.admitted)
        return []

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return after how many decode steps the sequence that ended the pass may fit."""
        return steps_until_admissible(self._blocked, running, memory, limit)

    def _few_others(self, key: str | None) -> bool:
        """Return whether at most 30 requests of other adapters are listed before the first of this one."""
        for place, sequence in enumerate(self._waiting):
            if place > MAX_OVERTAKES:
                return False
            if adapter_key(sequence) == key:
                return True
        return len(self) <= MAX_OVERTAKES
