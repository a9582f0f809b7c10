"""S-LoRA's request queue (S-LoRA, slora/server/router/req_queue.py, commit c1ddf48).

First come first served, head of line blocking, three limits:

* memory: the peak of the running sequences and the new ones (`scheduler.core.reservation`) must stay *below* the pool
  less 4 x rank slots for each distinct adapter;
* count: at most `running_max_req_size` sequences;
* prompt: at most `batch_max_tokens` prompt tokens in one new batch (what already runs does not count).

The first sequence that breaks one ends the walk. A candidate is charged as if its first token were already there:
(input + 1 held, max_new_tokens - 1 left), one more than after its prefill.

`strict` keeps what the original does with cancelled requests: a waiting one is skipped in the walk but stays listed
until a batch forms; a running one counts until the step after. It also lets in requests that can never fit, and these
block the queue for good. Without `strict` cancelled sequences leave at once, and such a request is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler.core.queues.base import WaitingList
from scheduler.core.reservation import PeakReservation, steps_until_fits
from scheduler.core.running import Running
from scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Check:
    """One memory-and-count test of an admission walk; peak and adapter slots include the candidate."""

    sequence: Sequence
    peak_tokens: int
    adapter_slots: int
    num_sequences: int
    passed: bool


class ReqQueue:
    """S-LoRA's `req_queue`.

    Args:
        max_total_token_num: KV pool, in tokens; adapters take their share of it.
        batch_max_tokens: prompt tokens that one new batch may hold.
        running_max_req_size: sequences that may run at once.
        strict: keep the original's quirks.
        on_check: told of every admission test, in order; for validation and study.
    """

    def __init__(
        self,
        max_total_token_num: int,
        batch_max_tokens: int,
        running_max_req_size: int,
        *,
        strict: bool = False,
        on_check: Callable[[Check], None] | None = None,
    ) -> None:
        self.max_total_token_num = max_total_token_num
        self.batch_max_tokens = batch_max_tokens
        self.running_max_req_size = running_max_req_size
        self.strict = strict
        self.on_check = on_check
        self._waiting = WaitingList()
        self._memory_blocks_head = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Let a sequence wait at the end; one that was queued before at its place by first arrival."""
        self._waiting.append(sequence)

    def cancel(self, handle: int) -> Sequence | None:
        """Remove and return a waiting sequence; in strict mode only mark and return it, the first time."""
        if not self.strict:
            return self._waiting.pop(handle)
        sequence = self._waiting.get(handle)
        if sequence is None or sequence.aborted:
            return None
        sequence.aborted = True
        return sequence

    def clear(self) -> list[Sequence]:
        """Remove and return all that wait, in order."""
        return self._waiting.clear()

    def admit(self, running: Running, at_ps: int) -> list[Sequence]:
        """Walk the queue from its head and take out what fits. Cost: O(batch) and the sequences admitted."""
        self._memory_blocks_head = False
        if len(running) >= self.running_max_req_size or not len(self._waiting):
            return []
        left, held = running.reservations()
        reservation = PeakReservation(left, held)
        adapters = set(running.adapter_ids)
        adapter_slots = running.adapter_slots
        admitted: list[Sequence] = []
        passed_over: list[Sequence] = []
        prompt_tokens = 0
        for sequence in self._waiting:
            if sequence.aborted:
                passed_over.append(sequence)
                continue
            adapter = sequence.adapter
            if adapter is not None and adapter.adapter_id not in adapters:
                adapters.add(adapter.adapter_id)
                adapter_slots += 4 * adapter.rank
            held_on_entry, left_on_entry = sequence.input_tokens + 1, sequence.budget_tokens - 1
            peak = reservation.peak_with(held_on_entry, left_on_entry)
            count = len(reservation) + 1
            fits = peak < self.max_total_token_num - adapter_slots and count <= self.running_max_req_size
            if self.on_check is not None:
                self.on_check(Check(sequence, peak, adapter_slots, count, fits))
            if not fits or prompt_tokens + sequence.input_tokens > self.batch_max_tokens:
                self._memory_blocks_head = not admitted and count <= self.running_max_req_size
                break
            reservation.add(held_on_entry, left_on_entry)
            prompt_tokens += sequence.input_tokens
            admitted.append(sequence)
        if admitted:
            # The original drops as many from the front as it has seen: admitted and, before the last of them or
            # behind it, cancelled.
            for sequence in (*admitted, *passed_over):
                self._waiting.remove(sequence.handle)
        return admitted

    def steps_blocked(self, running: Running, limit: int) -> int:
        """Return after how many decode steps the head may fit; exact, since nothing else changes meanwhile."""
        head = next((sequence for sequence in self._waiting if not sequence.aborted), None)
        if head is None or not self._memory_blocks_head:
            return limit
        pool = self.max_total_token_num - 1 - running.adapter_slots_with(head.adapter)
        return steps_until_fits(running, head.input_tokens + 1, head.budget_tokens - 1, pool, limit)

    def heeds_arrivals(self) -> bool:
        """Tell whether an arrival could be admitted: only if nobody blocks the head of the line."""
        return all(sequence.aborted for sequence in self._waiting)

    def next_batch(self) -> list[Sequence]:
        """Return what S-LoRA's prefetch looks ahead to: from the head, as far as the prompt limit allows."""
        ahead: list[Sequence] = []
        prompt_tokens = 0
        for sequence in self._waiting:
            if sequence.aborted:
                continue
            if prompt_tokens + sequence.input_tokens > self.batch_max_tokens:
                break
            prompt_tokens += sequence.input_tokens
            ahead.append(sequence)
        return ahead

    def can_ever_admit(self, sequence: Sequence) -> str | None:
        """Return None if an empty batch would take it (strict: always), else why not."""
        if self.strict:
            return None
        slots = 4 * sequence.adapter.rank if sequence.adapter is not None else 0
        need = sequence.input_tokens + sequence.budget_tokens
        if need + slots >= self.max_total_token_num:
            return (
                f"prompt and output have {need} tokens and the adapter takes {slots} slots;"
                f" together they must be less than max_total_token_num, which is {self.max_total_token_num}"
            )
        if sequence.input_tokens > self.batch_max_tokens:
            return f"prompt has {sequence.input_tokens} tokens; batch_max_tokens is {self.batch_max_tokens}"
        return None
