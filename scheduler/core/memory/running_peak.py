"""The peak reservation of a batch, updated as sequences come and go for as long as it is used.

If memory is no limit nothing reads it, so after `MOST_UNASKED` changes without a query it is discarded, and a change
costs nothing until the next query, which rebuilds it.
"""

from typing import Final

from lorrery.scheduler.core.memory.reservation import PeakReservation
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence

MOST_UNASKED: Final = 64
"""More changes than a batch has between two admission tries; a rebuild costs about as much as this many changes."""


class RunningPeak:
    """See the module."""

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
