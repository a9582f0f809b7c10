"""First come first served under vLLM's limits (`max_num_seqs`, `max_num_batched_tokens`; Kwon et al., SOSP 2023).

The head enters if the batch has a place, if the prompt tokens of this prefill stay within `max_num_batched_tokens`
(tokens that a prefix cache holds are not computed and do not count), and if the peak of all sequences
(`scheduler.core.reservation`) fits the pool, so that no sequence ever has to be preempted. Unlike S-LoRA's queue a
candidate is charged what it will hold after its prefill, no token more (the last token produced is never cached), and
the pool may be filled to the last token.
"""

from collections.abc import Callable, Iterator

from scheduler.core.queues.base import WaitingList
from scheduler.core.reservation import PeakReservation, steps_until_fits
from scheduler.core.running import Running
from scheduler.core.sequence import Sequence


class Fcfs:
    """First come first served.

    Args:
        max_total_token_num: KV pool, in tokens; an adapter takes 4 x rank of them, as in S-LoRA.
        max_num_seqs: sequences that may run at once.
        max_num_batched_tokens: prompt tokens computed in one prefill step.
        cached_tokens: how many leading tokens of a sequence need no computation.
    """

    def __init__(
        self,
        max_total_token_num: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        cached_tokens: Callable[[Sequence], int] = lambda sequence: 0,
    ) -> None:
        self.max_total_token_num = max_total_token_num
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._cached_tokens = cached_tokens
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
        """Remove and return a waiting sequence, if it is there."""
        return self._waiting.pop(handle)

    def clear(self) -> list[Sequence]:
        """Remove and return all that wait, in order."""
        return self._waiting.clear()

    def admit(self, running: Running, at_ps: int) -> list[Sequence]:
        """Take out from the head what fits. Cost: O(batch) and the sequences admitted."""
        self._memory_blocks_head = False
        if len(running) >= self.max_num_seqs or not len(self._waiting):
            return []
        left, held = running.reservations()
        reservation = PeakReservation(left, held)
        adapters = set(running.adapter_ids)
        adapter_slots = running.adapter_slots
        computed_tokens = 0
        admitted: list[Sequence] = []
        for sequence in self._waiting:
            slots = adapter_slots
            if sequence.adapter is not None and sequence.adapter.adapter_id not in adapters:
                slots += 4 * sequence.adapter.rank
            held_on_entry, left_on_entry = sequence.input_tokens + 1, sequence.budget_tokens - 2
            computed = sequence.input_tokens - self._cached_tokens(sequence)
            full = len(reservation) + 1 > self.max_num_seqs or computed_tokens + computed > self.max_num_batched_tokens
            if full or reservation.peak_with(held_on_entry, left_on_entry) > self.max_total_token_num - slots:
                self._memory_blocks_head = not full and not admitted
                break
            reservation.add(held_on_entry, left_on_entry)
            adapter_slots = slots
            if sequence.adapter is not None:
                adapters.add(sequence.adapter.adapter_id)
            computed_tokens += computed
            admitted.append(sequence)
        for sequence in admitted:
            self._waiting.remove(sequence.handle)
        return admitted

    def steps_blocked(self, running: Running, limit: int) -> int:
        """Return after how many decode steps the head may fit; exact, since nothing else changes meanwhile."""
        head = next(iter(self._waiting), None)
        if head is None or not self._memory_blocks_head:
            return limit
        pool = self.max_total_token_num - running.adapter_slots_with(head.adapter)
        return steps_until_fits(running, head.input_tokens + 1, head.budget_tokens - 2, pool, limit)

    def heeds_arrivals(self) -> bool:
        """Tell whether an arrival could be admitted: only if nobody waits before it."""
        return not len(self._waiting)

    def can_ever_admit(self, sequence: Sequence) -> str | None:
        """Return None if an empty batch would take it, else why not."""
        slots = 4 * sequence.adapter.rank if sequence.adapter is not None else 0
        need = sequence.input_tokens + sequence.budget_tokens - 1
        if need + slots > self.max_total_token_num:
            return (
                f"prompt and output hold up to {need} tokens and the adapter takes {slots} slots;"
                f" max_total_token_num is {self.max_total_token_num}"
            )
        if sequence.input_tokens > self.max_num_batched_tokens:
            return f"prompt has {sequence.input_tokens} tokens; max_num_batched_tokens is {self.max_num_batched_tokens}"
        return None
