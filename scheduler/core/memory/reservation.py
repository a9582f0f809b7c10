"""How many tokens a set of sequences will hold at its worst: S-LoRA's peak reservation.

Sort the sequences by tokens left, longest first. When the i-th of them ends, the i longest are still there, each
with left_i more tokens than now, so the pool then holds

    left_i * i + sum(held_1 ... held_i)          tokens, i = 1 ... n

and the peak is the greatest of these (S-LoRA, router/req_queue.py, `_can_add_new_req`; LightLLM has the same).

Under decode left falls by one a step and held rises by one: with F_i the decode step at which sequence i has nothing
nothing left after the next token, and h_i what it held at decode step 0, left_i = F_i - g and held_i = h_i + g at step
g. So the i-th value, v_i = F_i * i + sum(h_1 ... h_i), does not change with the steps. It changes as sequences come and
go: one that enters at place p moves those from p by one place, so that each of their values grows by F_i + h.

A waiting candidate does not change with the steps, though, so the peak *with* the candidate does, and a blocked head
may become admissible without any event. At step g it stands behind the p sequences that have as much left or more, and

    peak = max(v before p,  left * (p + 1) + sum(h_1 ... h_p) + g * p + held,  max(v + F, from p) - g + held)

For as long as p stays, the second term rises with g and the third falls, so the first step at which all three fit is
found by going through the few values that p takes.

The sequences are cut into blocks of some `WIDTH`. A block counts as if it were alone, u_i = F_i * i + sum(h ... h_i)
from its own first, so a change touches one block, whose values are recomputed at the next query. With k sequences
before the block, which hold H together, v_i = u_i + k F_i + H. With U the greatest u of a block, none of its v is above
U + k * (its greatest F) + H, which is off by at most k times the range of F in the block, some dozen tokens in a pool
of many thousands; a block where that bound is too high is scanned. So a change costs O(WIDTH), a query O(n / WIDTH),
and O(WIDTH) for each block that has changed or comes near the limit: usually just the one with the peak.

A block keeps s = F + h of each in place of h: what the sequence holds in the end. Like F that is never negative.

Invariants: `finishes` (F) descend, within a block and from one to the next; `sizes` (s) are in the same order;
`greatest` is U while `is_known`; no block is empty; equal F are in order of arrival, on which no peak depends.

`i64` is a machine integer if this is compiled (mypyc), and an `int` if not; small positive numbers of a list are read
fastest there. Products of two numbers of tokens or steps are far below its limit.
"""

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Final

from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.machine_ints import sum_of_first

if TYPE_CHECKING:
    from mypy_extensions import i64

WIDTH = 32
"""Sequences in a new block; a block is split when it has more than twice as many."""

_LEAST: Final = -(1 << 62)


@mypyc_attr(acyclic=True)
class _Block:
    """Consecutive sequences.

    Attributes:
        finishes: F of each.
        sizes: s of each.
        held: the sum of their h.
        greatest: the greatest of their u, if `is_known`.
    """

    __slots__ = ("finishes", "greatest", "held", "is_known", "sizes")

    def __init__(self, finishes: "list[i64]", sizes: "list[i64]", held: "i64") -> None:
        self.finishes = finishes
        self.sizes = sizes
        self.held = held
        self.greatest: i64 = _LEAST
        self.is_known = False

    def copy(self) -> "_Block":
        other = _Block(self.finishes.copy(), self.sizes.copy(), self.held)
        other.greatest, other.is_known = self.greatest, self.is_known
        return other

    def insert(self, place: "i64", finish: "i64", held: "i64") -> None:
        """Add a sequence at a place."""
        self.finishes.insert(place, finish)
        self.sizes.insert(place, finish + held)
        self.held += held
        self.is_known = False

    def delete(self, place: "i64") -> None:
        """Remove the sequence at a place."""
        self.held -= self.sizes[place] - self.finishes[place]
        del self.finishes[place], self.sizes[place]
        self.is_known = False

    def _work_out(self) -> None:
        finishes, sizes = self.finishes, self.sizes
        num: i64 = len(sizes)
        place: i64 = 0
        held: i64 = 0
        greatest: i64 = _LEAST
        while place < num:
            finish = finishes[place]
            held += sizes[place] - finish
            place += 1
            value = held + finish * place
            if value > greatest:
                greatest = value
        self.greatest, self.is_known = greatest, True

    def place_of(self, finish: "i64") -> "i64":
        """Return the place behind the sequences that have as much left or more."""
        finishes = self.finishes
        first: i64 = 0
        end: i64 = len(finishes)
        while first < end:
            middle = (first + end) >> 1
            if finishes[middle] < finish:
                end = middle
            else:
                first = middle + 1
        return first

    def held_before(self, place: "i64") -> "i64":
        """Return the sum of h before a place."""
        return sum_of_first(self.sizes, place) - sum_of_first(self.finishes, place)

    def peak(self, num_before: "i64", held_before: "i64", least: "i64", first: "i64", end: "i64") -> "i64":
        """Return the greatest v between two places, or `least` if that is more.

        Args:
            num_before: sequences before the block.
            held_before: the sum of their h.
            least: if the block's bound is not above this, it is not scanned.
            first: the first place in the block.
            end: the place after the last one.
        """
        if first >= end:
            return least
        if not self.is_known:
            self._work_out()
        finishes, sizes = self.finishes, self.sizes
        if self.greatest + num_before * finishes[first] + held_before > least:
            held = held_before + self.held_before(first)
            place = first
            while place < end:
                finish = finishes[place]
                held += sizes[place] - finish
                place += 1
                value = held + finish * (num_before + place)
                if value > least:
                    least = value
        return least


@mypyc_attr(acyclic=True)
class PeakReservation:
    """The peak of a set of sequences, and of that set with one more.

    Args:
        finishes: F of each sequence, descending.
        helds: h of each, in the same order.
    """

    __slots__ = ("_blocks", "_num")

    def __init__(self, finishes: Many[int] = (), helds: Many[int] = ()) -> None:
        self._num = len(finishes)
        self._blocks: list[_Block] = []
        for first in range(0, self._num, WIDTH):
            some: list[i64] = list(finishes[first : first + WIDTH])
            sizes: list[i64] = [finish + held for finish, held in zip(some, helds[first : first + WIDTH], strict=True)]
            self._blocks.append(_Block(some, sizes, sum(sizes) - sum(some)))

    def __len__(self) -> int:
        return self._num

    def copy(self) -> "PeakReservation":
        """Return an independent copy."""
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
            blocks.append(_Block([finish], [finish + held], held))
            return
        index, last = 0, len(blocks) - 1
        while index < last and blocks[index].finishes[-1] >= finish:
            index += 1
        block = blocks[index]
        block.insert(block.place_of(finish), finish, held)
        if len(block.sizes) > 2 * WIDTH:
            held_first = block.held_before(WIDTH)
            blocks[index : index + 1] = [
                _Block(block.finishes[:WIDTH], block.sizes[:WIDTH], held_first),
                _Block(block.finishes[WIDTH:], block.sizes[WIDTH:], block.held - held_first),
            ]

    def remove(self, finish: int, held: int) -> None:
        """Remove a sequence that was added with these values.

        Raises:
            ValueError: there is none.
        """
        for index, block in enumerate(self._blocks):
            finishes = block.finishes
            if finishes[-1] <= finish:
                if finishes[0] < finish:
                    break
                place = block.place_of(finish) - 1
                while place >= 0 and finishes[place] == finish:
                    if block.sizes[place] == finish + held:
                        self._delete(index, place)
                        return
                    place -= 1
        raise ValueError(f"no sequence that ends at {finish} and held {held}")

    def _delete(self, index: int, place: int) -> None:
        blocks = self._blocks
        block = blocks[index]
        self._num -= 1
        block.delete(place)
        if not block.sizes:
            del blocks[index]
        elif index and len(blocks[index - 1].sizes) + len(block.sizes) <= WIDTH:
            before = blocks[index - 1]
            together = _Block(before.finishes + block.finishes, before.sizes + block.sizes, before.held + block.held)
            blocks[index - 1 : index + 1] = [together]

    def _find(self, finish: "i64") -> "tuple[i64, i64, i64, i64]":
        """Find the place behind the sequences that have as much left or more.

        Returns:
            Index of the block (one past the last if there is none), the place in it, the number of sequences before it
            in total, and the sum of their h.
        """
        num_before: i64 = 0
        held_before: i64 = 0
        index: i64 = 0
        for block in self._blocks:
            if block.finishes[-1] < finish:
                place = block.place_of(finish)
                return index, place, num_before + place, held_before + block.held_before(place)
            num_before += len(block.sizes)
            held_before += block.held
            index += 1
        return index, 0, num_before, held_before

    # --- asking -----------------------------------------------------------------------------------------------------

    def peak_with(self, held: int, left: int, step: int) -> int:
        """Return the peak, in tokens, with one more sequence at this decode step. Cost: O(n).

        Args:
            held: tokens that it would hold.
            left: tokens that it would then have left after the next.
            step: the decode-step counter.
        """
        index, place, num_before, held_before = self._find(left + step)
        own = left * (num_before + 1) + held_before + step * num_before + held
        before, after = self._greatest_before(index, place, own), self._greatest_after(index, place, _LEAST)
        return max(before, after - step + held)

    def has_room(self, held: int, left: int, most: int, step: int) -> bool:
        """Return whether `peak_with` is at most `most`.

        Args:
            held: as in `peak_with`.
            left: as in `peak_with`.
            most: tokens in the pool.
            step: the decode-step counter.
        """
        index, place, num_before, held_before = self._find(left + step)
        if left * (num_before + 1) + held_before + step * num_before + held > most:
            return False
        most_after = most + step - held
        return (
            self._greatest_after(index, place, most_after) <= most_after
            and self._greatest_before(index, place, most) <= most
        )

    def _greatest_before(self, index: "i64", place: "i64", least: "i64") -> "i64":
        """Return the greatest v before a place, or `least` if that is more."""
        num_before: i64 = 0
        held_before: i64 = 0
        for block in self._blocks[:index]:
            size = len(block.sizes)
            least = block.peak(num_before, held_before, least, 0, size)
            num_before += size
            held_before += block.held
        return self._blocks[index].peak(num_before, held_before, least, 0, place) if place else least

    def _greatest_after(self, index: "i64", place: "i64", least: "i64") -> "i64":
        """Return the greatest v + F (v with one more sequence before it) from a place, or `least` if that is more."""
        num_before: i64 = 1
        held_before: i64 = 0
        for block in self._blocks:
            size = len(block.sizes)
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
            most: tokens in the pool.
            step: the decode-step counter now; none of the set may end within `limit` steps.
            limit: upper bound on the result.

        Returns:
            At least 1, at most `limit`.
        """
        blocks, last, at = self._blocks, step + limit - 1, step + 1
        index, place, num_before, held_before = self._find(left + at)
        while at <= last:
            # Up to step `same` the candidate has this place; of these steps, those within [first, until] fit.
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
                    place = len(blocks[index].sizes)
                place -= 1
                num_before -= 1
                held_before -= blocks[index].sizes[place] - blocks[index].finishes[place]
        return limit

    def _finish_before(self, index: "i64", place: "i64") -> "i64":
        """Return the F of the sequence before a place."""
        return self._blocks[index].finishes[place - 1] if place else self._blocks[index - 1].finishes[-1]
