"""How many tokens a set of sequences will hold at its worst: S-LoRA's peak reservation.

Sort the sequences by tokens left, longest first. When the i-th of them ends, the i longest are still there, each
with left_i more tokens than now, so the pool then holds

    left_i * i + sum(held_1 ... held_i)          tokens, i = 1 ... n

and the peak is the greatest of these (S-LoRA, router/req_queue.py, `_can_add_new_req`; LightLLM has the same).

Under decode left falls by one a step and held rises by one: with F_i the decode step at which sequence i has nothing
left after the next token, and h_i what it held at decode step 0, left_i = F_i - g and held_i = h_i + g at step g. So
the i-th value, v_i = F_i * i + sum(h_1 ... h_i), does not change with the steps. It changes as sequences come and go:
one that comes at place p moves those from p one place on, so that each of their values grows by F_i + h.

A candidate that waits does not change with the steps, though, so the peak *with* the candidate does, and a blocked head
may become admissible without any event. At step g it stands behind the p sequences that have as much left or more, and

    peak = max(v before p,  left * (p + 1) + sum(h_1 ... h_p) + g * p + held,  max(v + F, from p) - g + held)

For as long as p stays, the second term rises with g and the third falls, so the first step at which all three fit is
found by going through the few values that p takes.

The sequences are cut into blocks of some `WIDTH`. A block counts as if it were alone, u_i = F_i * i + sum(h ... h_i)
from its own first, so a change touches one block, whose values are worked out again when somebody asks next. With k
sequences before the block, which hold H together, v_i = u_i + k F_i + H. With U the greatest u of a block, none of its
v is above U + k * (its greatest F) + H, which is off by at most k times the range of F in the block, some dozen tokens
in a pool of many thousands; a block where that is too high is gone through. So a change costs O(WIDTH), a question
O(n / WIDTH), and O(WIDTH) for each block that has changed or comes near the limit: the one with the peak, as a rule.

Invariants: `descents` (-F) ascend, within a block and from one to the next; `helds` (h) are in the same order, and so
are `values` (u) while `is_known`; no block is empty; of equal F the order is that of coming, and no peak depends on it.

`i64` is a machine's integer where this is compiled (mypyc), and an `int` where not. Products of two numbers of tokens
or steps are far below its limit.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Final

from lorrery.vocabulary.compiling import mypyc_attr

if TYPE_CHECKING:
    from mypy_extensions import i64

WIDTH = 32
"""Sequences in a block as it is made; it is cut in two when it has more than twice as many."""

_LEAST: Final = -(1 << 62)


@mypyc_attr(acyclic=True)
class _Block:
    """Sequences that follow each other.

    Attributes:
        held: the sum of `helds`.
        values: u of each, if `is_known`.
        greatest: of the values.
    """

    __slots__ = ("descents", "greatest", "held", "helds", "is_known", "values")

    def __init__(self, descents: list[int], helds: list[int]) -> None:
        self.descents = descents
        self.helds = helds
        self.held = sum(helds)
        self.values: list[int] = []
        self.greatest = _LEAST
        self.is_known = False

    def copy(self) -> "_Block":
        other = _Block(self.descents.copy(), self.helds.copy())
        # A list of values is never changed, only replaced.
        other.values, other.greatest, other.is_known = self.values, self.greatest, self.is_known
        return other

    def insert(self, place: int, descent: int, held: int) -> None:
        """Add a sequence at a place."""
        self.descents.insert(place, descent)
        self.helds.insert(place, held)
        self.held += held
        self.is_known = False

    def delete(self, place: int) -> None:
        """Take out the sequence at a place."""
        self.held -= self.helds[place]
        del self.descents[place], self.helds[place]
        self.is_known = False

    def _work_out(self) -> None:
        descents, values = self.descents, list[int]()
        total: i64 = 0
        greatest: i64 = _LEAST
        for place, one_held in enumerate(self.helds):
            num: i64 = place
            held: i64 = one_held
            descent: i64 = descents[num]
            total += held
            value: i64 = total - descent * (num + 1)
            values.append(value)
            if value > greatest:
                greatest = value
        self.values, self.greatest, self.is_known = values, greatest, True

    def peak(self, num_before: "i64", held_before: "i64", least: "i64", first: "i64", end: "i64") -> "i64":
        """Return the greatest v between two places, or `least` if that is more.

        Args:
            num_before: sequences before the block.
            held_before: the sum of their h.
            least: what is not to be gone through for less.
            first: the first place in the block.
            end: the place after the last one.
        """
        if first >= end:
            return least
        if not self.is_known:
            self._work_out()
        descents, values = self.descents, self.values
        least -= held_before
        greatest: i64 = self.greatest
        descent: i64 = descents[first]
        if greatest - num_before * descent > least:
            place = first
            while place < end:
                descent = descents[place]
                value: i64 = values[place]
                value -= num_before * descent
                if value > least:
                    least = value
                place += 1
        return least + held_before


@mypyc_attr(acyclic=True)
class PeakReservation:
    """The peak of a set of sequences, and of that set with one more.

    Args:
        finishes: F of each sequence, descending.
        helds: h of each, in the same order.
    """

    __slots__ = ("_blocks", "_num")

    def __init__(self, finishes: Many[int] = (), helds: Many[int] = ()) -> None:
        descents = [-finish for finish in finishes]
        self._num = len(descents)
        self._blocks = [
            _Block(descents[first : first + WIDTH], list(helds[first : first + WIDTH]))
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
        blocks, descent = self._blocks, -finish
        self._num += 1
        if not blocks:
            blocks.append(_Block([descent], [held]))
            return
        index, last = 0, len(blocks) - 1
        while index < last and blocks[index].descents[-1] <= descent:
            index += 1
        block = blocks[index]
        block.insert(bisect_right(block.descents, descent), descent, held)
        if len(block.helds) > 2 * WIDTH:
            blocks[index : index + 1] = [
                _Block(block.descents[:WIDTH], block.helds[:WIDTH]),
                _Block(block.descents[WIDTH:], block.helds[WIDTH:]),
            ]

    def remove(self, finish: int, held: int) -> None:
        """Take out a sequence that was added with these.

        Raises:
            ValueError: there is none.
        """
        blocks, descent = self._blocks, -finish
        for index, block in enumerate(blocks):
            descents = block.descents
            if descents[-1] >= descent:
                if descents[0] > descent:
                    break
                place = bisect_left(descents, descent)
                while place < len(descents) and descents[place] == descent:
                    if block.helds[place] == held:
                        self._delete(index, place)
                        return
                    place += 1
        raise ValueError(f"no sequence that ends at {finish} and held {held}")

    def _delete(self, index: int, place: int) -> None:
        blocks = self._blocks
        block = blocks[index]
        self._num -= 1
        block.delete(place)
        if not block.helds:
            del blocks[index]
        elif index and len(blocks[index - 1].helds) + len(block.helds) <= WIDTH:
            before = blocks[index - 1]
            blocks[index - 1 : index + 1] = [_Block(before.descents + block.descents, before.helds + block.helds)]

    def _find(self, descent: int) -> tuple[int, int, int, int]:
        """Find the place behind those that have as much left or more.

        Returns:
            The block, which may be one behind the last, the place in it, how many are before it in all, and the sum of
            their h.
        """
        num_before = held_before = index = 0
        for block in self._blocks:
            if block.descents[-1] > descent:
                place = bisect_right(block.descents, descent)
                if place:
                    num_before += place
                    held_before += sum(block.helds[:place])
                return index, place, num_before, held_before
            num_before += len(block.helds)
            held_before += block.held
            index += 1
        return index, 0, num_before, held_before

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
        before, after = self._greatest_before(index, place, own), self._greatest_after(index, place, _LEAST)
        return max(before, after - step + held)

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
        num_before = held_before = 0
        for block in self._blocks[:index]:
            size = len(block.helds)
            least = block.peak(num_before, held_before, least, 0, size)
            num_before += size
            held_before += block.held
        return self._blocks[index].peak(num_before, held_before, least, 0, place) if place else least

    def _greatest_after(self, index: int, place: int, least: int) -> int:
        """Return the greatest v + F from a place, or `least` if that is more: v with one more before it."""
        num_before, held_before = 1, 0
        for block in self._blocks:
            size = len(block.helds)
            if index <= 0:
                least = block.peak(num_before, held_before, least, place, size)
                place = 0
            index -= 1
            num_before += size
            held_before += block.held
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
