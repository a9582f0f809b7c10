"""How many tokens a set of sequences will hold at its worst: S-LoRA's peak reservation.

Sort the sequences by tokens left, longest first. When the i-th of them ends, the i longest are still there, each
with left_i more tokens than now, so the pool then holds

    left_i * i + sum(held_1 ... held_i)          tokens, i = 1 ... n

and the peak is the greatest of these (S-LoRA, router/req_queue.py, `_can_add_new_req`; LightLLM has the same).

Under decode left falls by one a step and held rises by one: with F_i the decode step at which sequence i has nothing
left after the next token, and h_i what it held at decode step 0, left_i = F_i - g and held_i = h_i + g at step g. So
the i-th value, v_i = F_i * i + sum(h_1 ... h_i), does not change with the steps. It changes as sequences come and go:
one that comes at place p moves those from p one place on, so that each of their values grows by F_i + h, and one that
goes takes as much away.

A candidate that waits does not change with the steps, though, so the peak *with* the candidate does, and a blocked head
may become admissible without any event. At step g it stands behind the p sequences that have as much left or more, and

    peak = max(v before p,  left * (p + 1) + sum(h_1 ... h_p) + g * p + held,  max(v + F, from p) - g + held)

For as long as p stays, the second term rises with g and the third falls, so the first step at which all three fit is
found by going through the few values that p takes.

So the values are kept, and no maxima of them by place: those would have to be made anew for every change. They are cut
into blocks of some `WIDTH`, each with what its values are to rise by: `shift` times F, and `rise`. A change works out
one block and notes two numbers in each one after it. Whether somebody fits is told from bounds: with M the greatest
value of a block when it was worked out last,

    max (v + shift F + rise) <= M + shift * (greatest F if shift > 0 else least F) + rise

which is off by at most shift times the range of F in the block, some dozen tokens in a pool of many thousands. A block
whose bound is too high is gone through. So a change costs O(WIDTH + n / WIDTH), a question O(n / WIDTH) and WIDTH for
each block that comes near the limit: the one with the peak, as a rule.

Invariants: `descents` (-F) ascend, within a block and from one to the next; `helds` (h) and `values` are in the same
order; no block is empty; of equal F the order is that of coming, and no peak depends on it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Many
from itertools import accumulate, count
from operator import add, mul

WIDTH = 32
"""Sequences in a block as it is made; it is cut in two when it has more than twice as many."""

_LEAST = -(1 << 62)


class _Block:
    """Sequences that follow each other, and what their values are to rise by."""

    __slots__ = ("descents", "greatest", "helds", "rise", "shift", "values")

    def __init__(self, descents: list[int], helds: list[int], values: list[int], greatest: int | None = None) -> None:
        self.descents = descents
        self.helds = helds
        self.values = values
        self.shift = self.rise = 0
        self.greatest = max(values) if greatest is None else greatest

    def copy(self) -> "_Block":
        other = _Block(self.descents.copy(), self.helds.copy(), self.values.copy(), self.greatest)
        other.shift, other.rise = self.shift, self.rise
        return other

    def place_of(self, descent: int, held: int) -> int | None:
        """Return the place of a sequence with these; None: it is not here."""
        if self.descents[-1] < descent or self.descents[0] > descent:
            return None
        first = bisect_left(self.descents, descent)
        end = bisect_right(self.descents, descent, first)
        return self.helds.index(held, first, end) if held in self.helds[first:end] else None

    def value(self, place: int) -> int:
        """Return v at this place in the block."""
        return self.values[place] - self.shift * self.descents[place] + self.rise

    def bound(self, more: int) -> int:
        """Return what no v + `more` F is above."""
        shift = self.shift + more
        return self.greatest - shift * self.descents[0 if shift > 0 else -1] + self.rise

    def peak(self, more: int, first: int, end: int) -> int:
        """Return the greatest v + `more` F between two places; there is one."""
        shift = self.shift + more
        if not shift:
            return max(self.values[first:end]) + self.rise
        return (
            max([v - shift * d for v, d in zip(self.values[first:end], self.descents[first:end], strict=True)])
            + self.rise
        )

    def settle(self, place: int, more: int, rise: int) -> None:
        """Work the values out, those from `place` with so much more."""
        shift, self.shift = self.shift, 0
        all_rise, self.rise = self.rise, 0
        values, descents = self.values, self.descents
        if shift or all_rise:
            values[:place] = [v - shift * d + all_rise for v, d in zip(values[:place], descents, strict=False)]
        shift += more
        rise += all_rise
        values[place:] = [v - shift * d + rise for v, d in zip(values[place:], descents[place:], strict=True)]


class PeakReservation:
    """The peak of a set of sequences, and of that set with one more.

    Args:
        finishes: F of each sequence, descending.
        helds: h of each, in the same order.
    """

    __slots__ = ("_blocks", "_num")

    def __init__(self, finishes: Many[int] = (), helds: Many[int] = ()) -> None:
        descents = [-finish for finish in finishes]
        values = list(map(add, map(mul, finishes, count(1)), accumulate(helds)))
        self._num = len(descents)
        self._blocks = [
            _Block(descents[first : first + WIDTH], list(helds[first : first + WIDTH]), values[first : first + WIDTH])
            for first in range(0, self._num, WIDTH)
        ]

    def __len__(self) -> int:
        return self._num

    def copy(self) -> "PeakReservation":
        """Return one that changes by itself."""
        other = PeakReservation()
        other._num, other._blocks = self._num, [block.copy() for block in self._blocks]
        return other

    # --- coming and going -------------------------------------------------------------------------------------------

    def add(self, finish: int, held: int) -> None:
        """Add a sequence.

        Args:
            finish: its F.
            held: its h.
        """
        blocks = self._blocks
        self._num += 1
        if not blocks:
            blocks.append(_Block([-finish], [held], [finish + held]))
            return
        index, place, num_before, held_before = self._find(-finish)
        if index == len(blocks):
            index -= 1
            place = len(blocks[index].descents)
        block = blocks[index]
        block.settle(place, 1, held)
        block.descents.insert(place, -finish)
        block.helds.insert(place, held)
        block.values.insert(place, finish * (num_before + 1) + held_before + held)
        block.greatest = max(block.values)
        if len(block.values) > 2 * WIDTH:
            blocks[index : index + 1] = [
                _Block(block.descents[:WIDTH], block.helds[:WIDTH], block.values[:WIDTH]),
                _Block(block.descents[WIDTH:], block.helds[WIDTH:], block.values[WIDTH:]),
            ]
            index += 1
        for after in blocks[index + 1 :]:
            after.shift += 1
            after.rise += held

    def remove(self, finish: int, held: int) -> None:
        """Take out a sequence that was added with these.

        Raises:
            ValueError: there is none.
        """
        blocks, descent = self._blocks, -finish
        index, place = 0, None
        while index < len(blocks) and (place := blocks[index].place_of(descent, held)) is None:
            index += 1
        if place is None:
            raise ValueError(f"no sequence that ends at {finish} and held {held}")
        block = blocks[index]
        self._num -= 1
        del block.descents[place], block.helds[place], block.values[place]
        if block.values:
            block.settle(place, -1, -held)
            block.greatest = max(block.values)
            index += 1
        else:
            del blocks[index]
        for after in blocks[index:]:
            after.shift -= 1
            after.rise -= held
        if index < len(blocks) and index and len(blocks[index - 1].values) + len(blocks[index].values) <= WIDTH:
            self._merge(index - 1)

    def _merge(self, index: int) -> None:
        """Make one block of this one and the next."""
        one, other = self._blocks[index : index + 2]
        for block in (one, other):
            block.settle(0, 0, 0)
        self._blocks[index : index + 2] = [
            _Block(one.descents + other.descents, one.helds + other.helds, one.values + other.values)
        ]

    def _find(self, descent: int) -> tuple[int, int, int, int]:
        """Find the place behind those that have as much left or more.

        Returns:
            The block, which may be one behind the last, the place in it, how many are before it in all, and the sum of
            their h.
        """
        num_before = index = 0
        previous: _Block | None = None
        for block in self._blocks:
            if block.descents[-1] > descent:
                place = bisect_right(block.descents, descent)
                if not place:
                    break
                num_before += place
                return index, place, num_before, block.value(place - 1) + block.descents[place - 1] * num_before
            num_before += len(block.descents)
            index += 1
            previous = block
        if previous is None:
            return index, 0, 0, 0
        return index, 0, num_before, previous.value(-1) + previous.descents[-1] * num_before

    # --- asking -----------------------------------------------------------------------------------------------------

    def peak_with(self, held: int, left: int, step: int) -> int:
        """Return the peak, in tokens, if one more sequence were there at this decode step. Cost: O(n).

        Args:
            held: tokens that it would hold.
            left: tokens that it would then have left after the next.
            step: the decode-step counter.
        """
        index, place, num_before, held_before = self._find(-(left + step))
        own = left * (num_before + 1) + held_before + step * num_before + held
        before, after = self._greatest_before(index, place, 0), self._greatest_after(index, place, _LEAST)
        return max(before, own, after - step + held)

    def has_room(self, held: int, left: int, most: int, step: int) -> bool:
        """Tell whether `peak_with` is at most `most`.

        Args:
            held: as in `peak_with`.
            left: as in `peak_with`.
            most: tokens that the pool offers.
            step: the decode-step counter.
        """
        index, place, num_before, held_before = self._find(-(left + step))
        if left * (num_before + 1) + held_before + step * num_before + held > most:
            return False
        most_after = most + step - held
        return (
            self._greatest_after(index, place, most_after) <= most_after
            and self._greatest_before(index, place, most) <= most
        )

    def _greatest_before(self, index: int, place: int, least: int) -> int:
        """Return the greatest v before a place, or `least` if that is more."""
        blocks = self._blocks
        for block in blocks[:index]:
            if block.bound(0) > least:
                least = max(least, block.peak(0, 0, len(block.values)))
        if place and blocks[index].bound(0) > least:
            least = max(least, blocks[index].peak(0, 0, place))
        return least

    def _greatest_after(self, index: int, place: int, least: int) -> int:
        """Return the greatest v + F from a place, or `least` if that is more."""
        for block in self._blocks[index:]:
            if block.bound(1) > least:
                least = max(least, block.peak(1, place, len(block.values)))
            place = 0
        return least

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
        blocks, last, at = self._blocks, step + limit - 1, step + 1
        index, place, num_before, held_before = self._find(-(left + at))
        while at <= last:
            # The steps up to `same` have this place; of them those fit that are within [first, until].
            same = self._finish_before(index, place) - left if num_before else last
            own = left * (num_before + 1) + held_before + held
            until = min(same, last, (most - own) // num_before if num_before else (last if own <= most else step))
            if at <= until and self._greatest_before(index, place, most) <= most:
                first = self._greatest_after(index, place, at + most - held) + held - most
                if first <= until:
                    return first - step
            at = same + 1
            while num_before and self._finish_before(index, place) < left + at:
                if not place:
                    index -= 1
                    place = len(blocks[index].descents)
                place -= 1
                num_before -= 1
                held_before -= blocks[index].helds[place]
        return limit

    def _finish_before(self, index: int, place: int) -> int:
        """Return the F of the one before a place."""
        return -(self._blocks[index].descents[place - 1] if place else self._blocks[index - 1].descents[-1])
