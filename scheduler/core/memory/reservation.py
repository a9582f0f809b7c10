"""How many tokens a set of sequences will hold at its worst: S-LoRA's peak reservation.

Sort the sequences by tokens left, longest first. When the i-th of them ends, the i longest are still there, each
with left_i more tokens than now, so the pool then holds

    left_i * i + sum(held_1 ... held_i)          tokens, i = 1 ... n

and the peak is the greatest of these (S-LoRA, router/req_queue.py, `_can_add_new_req`; LightLLM has the same).

Under decode left falls by one a step and held rises by one: with F_i the decode step at which sequence i has nothing
left after the next token, and h_i what it held at decode step 0, left_i = F_i - g and held_i = h_i + g at step g. So
the i-th value, F_i * i + sum(h_1 ... h_i), does not change, and one index serves for as long as nobody comes or goes.

A candidate that waits does not change with the steps, though, so the peak *with* the candidate does, and a blocked head
may become admissible without any event. At step g it stands behind the p sequences that have as much left or more, and

    peak = max(values before p,  left * (p + 1) + sum(h_1 ... h_p) + g * p + held,  max(values + F, from p) - g + held)

For as long as p stays, the second term rises with g and the third falls, so the first step at which all three fit is
found by going through the few values that p takes.
"""

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Many

import numpy as np

from lorrery.scheduler.core.running import Running

_LEAST = -(1 << 62)


class PeakReservation:
    """The peak of a set of sequences, and of that set with one more.

    Cost: O(n) to make, O(log n) to ask.

    Args:
        finishes: F of each sequence, descending.
        helds: h of each, in the same order.
    """

    __slots__ = ("_after", "_ascending", "_before", "_finishes", "_held_before", "_helds")

    def __init__(self, finishes: Many[int], helds: Many[int]) -> None:
        self._finishes = list(finishes)
        self._helds = list(helds)
        self._index()

    def __len__(self) -> int:
        return len(self._finishes)

    def _index(self) -> None:
        """Work out the values, and the greatest before and from each position."""
        finishes = np.array(self._finishes, np.int64)
        held_before = np.cumsum(np.array(self._helds, np.int64))
        values = finishes * np.arange(1, len(finishes) + 1) + held_before
        # Back to lists: what is asked of them is one element at a time.
        self._ascending: list[int] = (-finishes).tolist()
        self._held_before: list[int] = [0, *held_before.tolist()]
        self._before: list[int] = [0, *np.maximum.accumulate(values).tolist()]
        self._after: list[int] = [*np.maximum.accumulate((values + finishes)[::-1])[::-1].tolist(), _LEAST]

    def peak_with(self, held: int, left: int, step: int) -> int:
        """Return the peak, in tokens, if one more sequence were there at this decode step.

        Args:
            held: tokens that it would hold.
            left: tokens that it would then have left after the next.
            step: the decode-step counter.
        """
        position = bisect_right(self._ascending, -(left + step))
        own = left * (position + 1) + self._held_before[position] + step * position + held
        return max(self._before[position], own, self._after[position] - step + held)

    def steps_until_at_most(self, held: int, left: int, most: int, step: int, limit: int) -> int:
        """Return after how many decode steps from `step` the peak with a waiting sequence is at most `most`.

        Args:
            held: as in `peak_with`.
            left: as in `peak_with`.
            most: tokens that the pool offers.
            step: the decode-step counter now; none of the set may end within `limit` steps.
            limit: the answer where it is this or more.

        Returns:
            At least 1, at most `limit`.
        """
        finishes, last = self._finishes, step + limit - 1
        at = step + 1
        position = bisect_right(self._ascending, -(left + at))
        while at <= last:
            # The steps up to `same` have this position; of them those fit that are within [first, until].
            same = finishes[position - 1] - left if position else last
            if self._before[position] <= most:
                first = max(at, self._after[position] + held - most)
                own = left * (position + 1) + self._held_before[position] + held
                until = (most - own) // position if position else (last if own <= most else step)
                if first <= min(until, same, last):
                    return first - step
            if same >= last:
                break
            at = same + 1
            while position and finishes[position - 1] < left + at:
                position -= 1
        return limit

    def with_more(self, entries: Iterable[tuple[int, int]], step: int) -> "PeakReservation":
        """Return the reservation of this set and more sequences.

        Args:
            entries: (held, left) of each, as in `peak_with`.
            step: the decode-step counter.
        """
        finishes, helds, ascending = list(self._finishes), list(self._helds), list(self._ascending)
        for held, left in entries:
            position = bisect_right(ascending, -(left + step))
            ascending.insert(position, -(left + step))
            finishes.insert(position, left + step)
            helds.insert(position, held - step)
        return PeakReservation(finishes, helds)


class RunningPeak:
    """The peak reservation of a batch, made once for as long as nobody comes or goes."""

    def __init__(self) -> None:
        self._version = -1
        self._reservation = PeakReservation((), ())

    def of(self, running: Running) -> PeakReservation:
        """Return the reservation; good for any decode step, unless a sequence is in prefill."""
        if running.prefilling or running.version != self._version:
            self._reservation = PeakReservation(*running.reservations())
            self._version = -1 if running.prefilling else running.version
        return self._reservation
