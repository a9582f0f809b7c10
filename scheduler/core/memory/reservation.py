"""How many tokens a set of sequences will hold at its worst: S-LoRA's peak reservation.

Sort the sequences by tokens left, longest first. When the i-th of them ends, the i longest are still there, each
with left_i more tokens than now, so the pool then holds

    left_i * i + sum(held_1 ... held_i)          tokens, i = 1 ... n

and the peak is the greatest of these (S-LoRA, router/req_queue.py, `_can_add_new_req`; LightLLM has the same).

Under decode the value of each i is constant, since left falls by one and the i helds rise by one. A candidate that
waits does not change with it, though, so the peak *with* the candidate does, and a blocked head may become admissible
without any event. `peaks_with_after` gives that peak for many future steps at once.
"""

import numpy as np
from numpy.typing import NDArray

from scheduler.core.running import Running

Int64s = NDArray[np.int64]


class PeakReservation:
    """The peak of a set of sequences, and of that set with one more.

    Args:
        left: shape (n,), int64, tokens left after the next one, descending.
        held: shape (n,), int64, tokens held now.
    """

    def __init__(self, left: Int64s, held: Int64s) -> None:
        self._left = left
        self._held = held
        self._index()

    def __len__(self) -> int:
        return len(self._left)

    def _index(self) -> None:
        count = len(self._left)
        self._ascending = -self._left
        self._held_before = np.concatenate(([0], np.cumsum(self._held)))
        peaks = self._left * np.arange(1, count + 1) + self._held_before[1:]
        # greatest value among those before / at and after a position; the candidate adds its own tokens to the latter
        self._before = np.concatenate(([0], np.maximum.accumulate(peaks)))
        after = np.maximum.accumulate((peaks + self._left)[::-1])[::-1] if count else peaks
        self._after = np.concatenate((after, [np.iinfo(np.int64).min // 2]))

    def peak_with(self, held: int, left: int, after: int = 0) -> int:
        """Return the peak, in tokens, if one more sequence were there after so many decode steps of the others."""
        position = int(np.searchsorted(self._ascending, -(left + after), side="right"))
        own = left * (position + 1) + int(self._held_before[position]) + after * position + held
        behind = int(self._after[position]) - after + held
        return max(int(self._before[position]), own, behind)

    def peaks_with_after(self, held: int, left: int, steps: Int64s) -> Int64s:
        """Return the peak with a waiting sequence after each of these numbers of decode steps.

        Args:
            held: tokens the waiting sequence would hold on entry.
            left: tokens it would then have left.
            steps: shape (k,), decode steps that the present set runs first; none may end within them.

        Returns:
            shape (k,), int64.
        """
        # Position of the newcomer: after all that have as many tokens left or more (the sort is stable).
        position = np.searchsorted(self._ascending, -(left + steps), side="right")
        own = left * (position + 1) + self._held_before[position] + steps * position + held
        behind = self._after[position] - steps + held
        peaks: Int64s = np.maximum(np.maximum(self._before[position], own), behind)
        return peaks

    def add(self, held: int, left: int) -> None:
        """Take one more sequence into the set."""
        position = int(np.searchsorted(self._ascending, -left, side="right"))
        self._left = np.insert(self._left, position, left)
        self._held = np.insert(self._held, position, held)
        self._index()


class RunningPeak:
    """The peak reservation of a batch, made once for as long as nobody comes or goes.

    What moves with the decode steps is known in closed form, so a test at a later step asks the same reservation.
    """

    def __init__(self) -> None:
        self._version = -1
        self._step = 0
        self._reservation = PeakReservation(np.empty(0, np.int64), np.empty(0, np.int64))

    def of(self, running: Running) -> tuple[PeakReservation, int]:
        """Return the reservation, and how many decode steps ago it was made."""
        if running.prefilling or running.version != self._version:
            self._reservation = PeakReservation(*running.reservations())
            self._step = running.decode_step
            self._version = -1 if running.prefilling else running.version
        return self._reservation, running.decode_step - self._step

    def steps_until_at_most(self, running: Running, held: int, left: int, pool_tokens: int, limit: int) -> int:
        """Return after how many decode steps a waiting sequence's peak is at most `pool_tokens`.

        Args:
            running: the batch; none of it may end within `limit` steps.
            held: tokens the waiting sequence would hold on entry.
            left: tokens it would then have left.
            pool_tokens: what the pool offers, adapters deducted.
            limit: the answer where it is this or more.

        Returns:
            At least 1, at most `limit`.
        """
        if limit <= 1:
            return limit
        reservation, since = self.of(running)
        peaks = reservation.peaks_with_after(held, left, np.arange(since + 1, since + limit))
        fits = np.flatnonzero(peaks <= pool_tokens)
        return int(fits[0]) + 1 if len(fits) else limit
