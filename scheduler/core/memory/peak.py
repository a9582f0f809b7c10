"""S-LoRA's memory rule: admit only sequences that fit beside all others at the peak, so that none is ever preempted.

The pool also holds the weights of the adapters in use; `Adapter.slots` says how many of its slots each takes.

    peak(running + new) < pool - slots of the distinct adapters             S-LoRA (strictly below)
    peak(running + new) <= pool - slots of the distinct adapters            exact

Chunked prefill lets others decode while a prompt is computed in chunks, so that its sequence ends later than S-LoRA's
formula has it: by as many steps as the chunks may take. It is charged for these too, unless all ends together fit.

S-LoRA charges a new sequence (input + 1 held, max_new_tokens - 1 left), one token more than the same sequence after its
prefill; `exact` charges it (input + 1, max_new_tokens - 2), since the last token produced is never cached.
"""

from typing import Final

from lorrery.scheduler.core.memory.base import BlockUse, Check, Memory, Trial
from lorrery.scheduler.core.memory.reservation import PeakReservation
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence

MOST_UNASKED: Final = 64
"""More changes than a batch has between two admission tries; a rebuild costs about as much as this many changes."""


class RunningPeak:
    """The peak reservation of a batch, updated as sequences come and go for as long as it is used.

    If memory is no limit nothing reads it, so after `MOST_UNASKED` changes without a query it is discarded, and a
    change costs nothing until the next query, which rebuilds it.
    """

    def __init__(self) -> None:
        self._reservation = PeakReservation()
        self._entries: dict[int, tuple[int, int]] = {}  # F and h of sequences in the reservation, by handle
        self._is_kept = False
        self._num_unasked = 0

    def of(self, running: Running, least_chunk: int | None) -> PeakReservation:
        """Return the reservation, valid for any decode step unless a sequence is in prefill; read-only.

        Args:
            running: the batch.
            least_chunk: see `PeakMemory`.
        """
        self._num_unasked = 0
        if not self._is_kept or len(self._entries) != running.num_decoding:  # held ones grow no more
            self._make(running)
        if not running.prefilling:
            return self._reservation
        # They count as if they had their first token; as they do not decode, their tokens left do not fall with steps.
        step, with_newcomers, prompt_tokens = running.decode_step, self._reservation.copy(), 0
        for sequence in running.prefilling.values():
            prompt_tokens += sequence.input_tokens - sequence.computed_tokens
            left = sequence.budget_tokens - 2 + steps_late(prompt_tokens, least_chunk)
            with_newcomers.add(step + left, sequence.input_tokens + 1 - step)
        return with_newcomers

    def _make(self, running: Running) -> None:
        self._entries = {sequence.handle: _entry(sequence) for sequence in running}
        ordered = sorted(self._entries.values(), reverse=True)
        self._reservation = PeakReservation([finish for finish, _ in ordered], [held for _, held in ordered])
        self._is_kept = True

    def joined(self, sequence: Sequence) -> None:
        """Note that a sequence decodes from now on."""
        if self._is_changed():
            self._entries[sequence.handle] = entry = _entry(sequence)
            self._reservation.add(entry[0], entry[1])

    def left(self, sequence: Sequence) -> None:
        """Note that a sequence has left."""
        if self._is_kept:
            entry = self._entries.pop(sequence.handle, None)
            if entry is not None and self._is_changed():
                self._reservation.remove(entry[0], entry[1])

    def _is_changed(self) -> bool:
        """Count a change, and return whether it has to be applied."""
        self._num_unasked += 1
        if self._num_unasked > MOST_UNASKED:
            self._is_kept = False
        return self._is_kept


def steps_late(prompt_tokens: int, least_chunk: int | None) -> int:
    """Return how many steps others may decode before this many prompt tokens, those ahead included, are computed.

    A sequence in prefill meanwhile holds its prompt and ends that much later. Counting it as if it decoded all the
    while, and then for as long as it may, never underestimates it.
    """
    return 0 if least_chunk is None else max(0, -(-prompt_tokens // least_chunk) - 1)


def _entry(sequence: Sequence) -> tuple[int, int]:
    return sequence.finish_step - 1, sequence.input_tokens - sequence.base_step


class PeakMemory(Memory):
    """Reservation of the peak.

    Args:
        pool_tokens: size of the pool, adapters included.
        exact: correct S-LoRA's charge of one token too many and its strict comparison.
        together: no sequence leaves before all have ended (static batching), so the peak is the sum of all ends.
        keep_refused: a refused candidate stays counted for the rest of the pass, as S-LoRA's cluster policy has it.
        report_peaks: let checks carry the exact peak, not only whether the candidate fits.
        least_chunk: fewest prompt tokens of a step in which others decode, while prompts are computed in chunks; None:
            a prompt takes one step.
    """

    reserved = True

    def __init__(
        self,
        pool_tokens: int,
        *,
        exact: bool = False,
        together: bool = False,
        keep_refused: bool = False,
        report_peaks: bool = False,
        least_chunk: int | None = None,
    ) -> None:
        self.pool_tokens = pool_tokens
        self.exact = exact
        self.together = together
        self.keep_refused = keep_refused
        self.report_peaks = report_peaks
        self.least_chunk = least_chunk
        self.running_peak = RunningPeak()

    def charge(self, sequence: Sequence) -> tuple[int, int]:
        """Return the charge of a new sequence: (tokens held, tokens left after the next)."""
        return sequence.input_tokens + 1, sequence.budget_tokens - (2 if self.exact else 1)

    def most_tokens(self, adapter_slots: int) -> int:
        """Return the highest peak that is admitted beside these adapters."""
        return self.pool_tokens - adapter_slots - (0 if self.exact else 1)

    def trial(self, running: Running) -> Trial:
        """Begin an admission pass. Cost: O(batch)."""
        return _PeakTrial(self, running)

    def steps_until_fits(self, running: Running, sequence: Sequence, limit: int) -> int:
        """Return after how many decode steps a waiting sequence fits; exact."""
        slots = running.adapter_slots_with(sequence.adapter)
        reservation, most = self.running_peak.of(running, self.least_chunk), self.most_tokens(slots)
        held, left = self.charge(sequence)
        left += steps_late(running.prompt_tokens_left + sequence.input_tokens, self.least_chunk)
        return reservation.steps_until_at_most(held, left, most, running.decode_step, limit)

    @property
    def capacity(self) -> tuple[int, ...]:
        """What `can_ever_hold` depends on."""
        return self.pool_tokens, self.exact

    def can_ever_hold(self, sequence: Sequence) -> str | None:
        """Return None if an empty pool holds the sequence to its end, else why not."""
        slots = sequence.adapter.slots if sequence.adapter is not None else 0
        held, left = self.charge(sequence)
        if held + left <= self.most_tokens(slots):
            return None
        return (
            f"prompt and output need {held + left} tokens and the adapter takes {slots} slots;"
            f" max_total_token_num is {self.pool_tokens}"
        )

    def admitted(self, sequence: Sequence) -> None:
        """Reserve nothing: the next pass counts all running sequences."""

    def joined(self, sequence: Sequence) -> None:
        """Count it in the batch's peak."""
        self.running_peak.joined(sequence)

    def left(self, sequence: Sequence) -> None:
        """Uncount it in the batch's peak."""
        self.running_peak.left(sequence)

    def steps_before_full(self, running: Running, limit: int) -> int:
        """Return `limit`: the peak is reserved."""
        return limit

    def victim(self, running: Running) -> Sequence | None:
        """Return None: the peak is reserved."""
        return None

    def spare_tokens(self, running: Running, num_steps: int) -> int:
        """Return the tokens not held by sequences and adapters after that step; reserved ones are free till used."""
        held = running.kv_tokens + (num_steps + 1) * running.num_decoding + running.adapter_slots
        return max(0, self.pool_tokens - held)

    def block_use(self, running: Running) -> BlockUse | None:
        """Return None: the pool is counted in tokens."""
        return None


class _PeakTrial(Trial):
    """One pass over candidates.

    No peak is higher than the sum of all ends. As long as that fits, a candidate costs one addition; only otherwise is
    the reservation evaluated.
    """

    def __init__(self, memory: PeakMemory, running: Running) -> None:
        self._memory = memory
        self._running = running
        self._taken: list[tuple[int, int]] = []
        self._total_tokens = 0 if memory.together else running.reserved_tokens
        self._prompt_tokens = 0 if memory.least_chunk is None else running.prompt_tokens_left
        self._reservation: PeakReservation | None = None
        self._num_reserved = 0  # taken ones already in the copied reservation
        self._num_present = 0 if memory.together else len(running)
        self._new_adapters: set[str] = set()
        self._adapter_slots = running.adapter_slots

    def test(self, sequence: Sequence) -> Check:
        """Test one more sequence."""
        memory = self._memory
        held, left = memory.charge(sequence)
        slots = self._slots_with(sequence.adapter)
        most = memory.most_tokens(slots)
        peak = self._total_tokens + held + left
        fits = peak <= most
        if not memory.together:
            if memory.report_peaks:
                peak = self._reserved().peak_with(held, left, self._running.decode_step)
                fits = peak <= most
            elif not fits:
                left += steps_late(self._prompt_tokens + sequence.input_tokens, memory.least_chunk)
                fits = self._reserved().has_room(held, left, most, self._running.decode_step)
        check = Check(sequence, peak, slots, self._num_present + len(self._taken) + 1, fits)
        if memory.keep_refused:
            self._add(sequence)
        return check

    def take(self, sequence: Sequence) -> None:
        """Count a sequence that passed as taken."""
        if not self._memory.keep_refused:
            self._add(sequence)

    def _reserved(self) -> PeakReservation:
        """Return the reservation of running and taken sequences."""
        if self._reservation is None:
            self._reservation = self._memory.running_peak.of(self._running, self._memory.least_chunk)
        if self._num_reserved < len(self._taken):
            if not self._num_reserved:
                self._reservation = self._reservation.copy()
            step = self._running.decode_step
            for held, left in self._taken[self._num_reserved :]:
                self._reservation.add(left + step, held - step)
            self._num_reserved = len(self._taken)
        return self._reservation

    def _slots_with(self, adapter: Adapter | None) -> int:
        if adapter is None or self._running.uses(adapter.key) or adapter.key in self._new_adapters:
            return self._adapter_slots
        return self._adapter_slots + adapter.slots

    def _add(self, sequence: Sequence) -> None:
        held, left = self._memory.charge(sequence)
        self._total_tokens += held + left
        self._prompt_tokens += sequence.input_tokens
        self._taken.append((held, left + steps_late(self._prompt_tokens, self._memory.least_chunk)))
        self._adapter_slots = self._slots_with(sequence.adapter)
        if sequence.adapter is not None:
            self._new_adapters.add(sequence.adapter.key)
