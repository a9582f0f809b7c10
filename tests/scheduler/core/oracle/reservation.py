"""The peak reservation as it was made anew for every set: maxima by place, in numpy. The oracle of the kept one."""

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Many

import numpy as np

_LEAST = -(1 << 62)


class IndexedReservation:
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

    def with_more(self, entries: Iterable[tuple[int, int]], step: int) -> "IndexedReservation":
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
        return IndexedReservation(finishes, helds)
