"""A few adapters at once, or one: requests of the adapters in the batch go first.

S-LoRA's `cluster` and `peft` (slora/server/router, commit c1ddf48). Fewer adapters in a batch make its LoRA part
cheaper, and leave more of the pool to sequences.
"""

from collections.abc import Iterator

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.base import ListedQueue, steps_until_admissible
from lorrery.scheduler.core.queues.waiting import MAX_OVERTAKES, Patience, WaitingByAdapter, adapter_key
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class Cluster(ListedQueue):
    """Prefer the adapters in the batch, of which there are few.

    S-LoRA's `cluster` (slora/server/router/cluster_req_queue.py, commit c1ddf48; `--batch-num-adapters k`). The pass
    goes over the requests whose adapter is in the batch, in order of arrival, then over the others as long as the batch
    has room for another adapter, and ends at the first refusal. At most `MAX_OVERTAKES` sequences overtake the one that
    has waited longest; then none enters before it.

    `strict` keeps the original's:

    * `soft_cap`: the limit only says when to prefer the batch's adapters. With fewer than k running, a new batch may
      bring any number; with k, the second pass brings others all the same. The base model counts as an adapter.
    * `polluted_test`: a candidate that was refused in the first pass stays counted for the second, and may count twice.
    * `cancelled_vanish`: with k adapters running, cancelled requests that the pass met are removed even if nothing
      enters, but not if all waiting ones are cancelled; with fewer, they stay listed until a batch forms.
    * `no_bound`: an adapter may starve while those in the batch keep getting requests.

    Each has a counterpart in the default: a hard limit (the base model is free), one pass, cancelled ones leave at
    once, and the bound above. The pollution is the memory rule's, `PeakMemory(keep_refused=True)`.

    Cost of a pass: one test more than sequences enter, and O(distinct waiting adapters); strict: O(waiting).

    Args:
        max_adapters: distinct adapters in a batch (S-LoRA's `batch_num_adapters`), at least 1.
        strict: keep S-LoRA's bugs.
        max_overtakes: how many sequences may overtake the one that has waited longest.
    """

    def __init__(self, max_adapters: int, *, strict: bool = False, max_overtakes: int = MAX_OVERTAKES) -> None:
        super().__init__(strict=strict)
        self._waiting = self._by_adapter = WaitingByAdapter()
        self.max_adapters = max_adapters
        self._patience = Patience(max_overtakes)
        self._in_two_passes = False

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try in the order above."""
        self._blocked = None
        if self.strict:
            self._admit_as_slora(admission, running)
            return []
        head = self._waiting.first
        if head is None:
            return []
        left = self._patience.left(head)
        in_order = self._order(running, head, head_first=not left)
        self._blocked = self._patience.admit(admission, head, in_order, left)
        self._waiting.remove_all(admission.admitted)
        return []

    def _order(self, running: Running, head: Sequence, *, head_first: bool) -> Iterator[Sequence]:
        """Yield sequences to try, in order; each one yielded counts as entering."""
        adapter_keys: set[str | None] = {None, *running.adapter_keys}

        def has_room(sequence: Sequence) -> bool:
            return adapter_key(sequence) in adapter_keys or len(adapter_keys) <= self.max_adapters

        if head_first:
            if not has_room(head):
                return
            adapter_keys.add(adapter_key(head))
            yield head
        waiting, preferred = self._by_adapter, frozenset(adapter_keys)
        ahead = waiting.merged(preferred)
        while (sequence := ahead.first) is not None:
            ahead.take()
            if not head_first or sequence is not head:
                yield sequence
        if len(adapter_keys) > self.max_adapters:
            return
        others = waiting.merged(key for key in waiting.adapters if key not in preferred)
        while (sequence := others.first) is not None:
            if has_room(sequence):
                adapter_keys.add(adapter_key(sequence))
                others.take()
                yield sequence
            else:
                others.drop_adapter()

    # --- S-LoRA's way -----------------------------------------------------------------------------------------------

    def _admit_as_slora(self, admission: AdmissionPass, running: Running) -> None:
        in_batch: set[str | None] = set(running.adapter_keys)
        if len(running) > running.adapter_pins:
            in_batch.add(None)
        self._in_two_passes = len(in_batch) >= self.max_adapters
        if not self._in_two_passes:
            met = self._pass(admission, list(self._waiting))
            self._blocked = admission.refused
            if admission.admitted:
                self._waiting.remove_all((*admission.admitted, *met))
            return
        if self.at_rest():
            return
        waiting = list(self._waiting)
        while waiting[0].aborted:
            self._waiting.remove(waiting.pop(0).handle)
        met = self._pass(admission, [sequence for sequence in waiting if adapter_key(sequence) in in_batch])
        seen = {sequence.handle for sequence in (*admission.admitted, *met)}
        met += self._pass(admission, [sequence for sequence in waiting if sequence.handle not in seen])
        self._waiting.remove_all((*admission.admitted, *met))

    def _pass(self, admission: AdmissionPass, sequences: list[Sequence]) -> list[Sequence]:
        """Try sequences up to the first refusal; return the cancelled ones met."""
        met: list[Sequence] = []
        for sequence in sequences:
            if sequence.aborted:
                met.append(sequence)
            elif not admission.admit(sequence):
                break
        return met

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return after how many decode steps the sequence that ended the pass may fit; with two passes (strict) 1."""
        if self._in_two_passes and len(self):
            return 1
        return steps_until_admissible(self._blocked, running, memory, limit)


class Peft(ListedQueue):
    """One adapter at a time, as if its weights were merged into the base model's.

    S-LoRA's `peft` (slora/server/router/peft_req_queue.py, commit c1ddf48), its model of HuggingFace PEFT: a batch
    serves one adapter (the base model is one too), and the next adapter has its turn when the batch has drained.

    The batch's adapter, or with nothing running that of the request that has waited longest, is walked in order of
    arrival up to the first refusal. At most `MAX_OVERTAKES` sequences overtake the one that has waited longest; then
    the batch drains, and that one's adapter is next.

    `strict` keeps the original's:

    * `counts_others`: instead of that bound, the batch drains if more than 30 requests of other adapters are listed
      before the first of its own. A single request of another adapter may starve.
    * `cancelled_stay_listed`: a cancelled request is never removed; it counts among the 30, and at the head of the list
      it chooses the adapter, for which a batch may then never form.

    Cost of a pass: one test more than sequences enter; it does not grow with the queue.

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
        to_try = (sequence for sequence in self._by_adapter.of(key) if not sequence.aborted)
        self._blocked = self._patience.admit(admission, head, to_try, left)
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
