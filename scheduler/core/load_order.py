"""Which worker of many, or of a subset, has the least load, and of those the fewest KV tokens.

Workers of equal load are kept together: as bits of an integer, and in order of their KV tokens. A worker is noted
whenever its load may have changed or its KV tokens may have decreased (`many_workers`). In between the tokens only
grow, by steps that a driver has perhaps not committed yet. So the tokens in the order never exceed the true ones: the
first of the workers in question is brought up to date, and if it is still the first, it is the answer.

Cost: a logarithm, and a move of a few words, for each note that changes a load or lowers the tokens, and for each
update; for a choice among some, a step for each of them that has that load. A worker is brought up to date only when
its tokens may be the fewest, so updates are few while many workers are equally loaded.
"""

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Final, Protocol

from lorrery.vocabulary.machine_ints import bisect_left, insort

if TYPE_CHECKING:
    from mypy_extensions import i64

_NUMBER_BITS: Final = 24
_NUMBERS: Final = (1 << _NUMBER_BITS) - 1


class Loaded(Protocol):
    """The figures that determine the order; see `placements.base.Candidate`."""

    @property
    def load(self) -> int:
        """See there."""
        ...

    @property
    def kv_tokens(self) -> int:
        """See there."""
        ...


class _Level:
    """The workers of one load.

    Attributes:
        numbers: of the workers, as bits.
        order: lower bound on KV tokens, and number, of each in one integer; ascending.
    """

    __slots__ = ("numbers", "order")

    def __init__(self) -> None:
        self.numbers = 0
        self.order: list[i64] = []


class LoadOrder:
    """See the module.

    Args:
        candidates: the workers, by number; they do not change.

    Attributes:
        candidates: as given.
        total: sum of the loads.
    """

    __slots__ = ("_ascending", "_entries", "_levels", "_loads", "candidates", "total")

    def __init__(self, candidates: Many[Loaded]) -> None:
        self.candidates = candidates
        self.total = 0
        self._loads: list[int] = []
        self._entries: list[i64] = []
        self._levels: dict[int, _Level] = {}
        self._ascending: list[i64] = []
        for number, candidate in enumerate(candidates):
            self._loads.append(candidate.load)
            self._entries.append(number)
            self._enter(number)
            self.total += candidate.load

    def note(self, number: int, load: int, kv_tokens: int) -> None:
        """Record a worker's load, and a lower bound on its KV tokens until the next note."""
        before, entry = self._loads[number], kv_tokens << _NUMBER_BITS | number
        if load == before and entry >= self._entries[number]:
            return
        self._leave(number)
        self.total += load - before
        self._loads[number], self._entries[number] = load, entry
        self._enter(number)

    def _enter(self, number: int) -> None:
        load = self._loads[number]
        level = self._levels.get(load)
        if level is None:
            level = self._levels[load] = _Level()
            insort(self._ascending, load)
        level.numbers |= 1 << number
        insort(level.order, self._entries[number])

    def _leave(self, number: int) -> None:
        load = self._loads[number]
        level = self._levels[load]
        level.numbers ^= 1 << number
        if level.numbers:
            del level.order[bisect_left(level.order, self._entries[number])]
        else:
            del self._levels[load]
            del self._ascending[bisect_left(self._ascending, load)]

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def least_load(self) -> int:
        """The load of the least loaded worker."""
        return self._ascending[0]

    def with_at_most(self, load: int) -> int:
        """Return the workers with at most this load, as bits."""
        found = 0
        for one in self._ascending:
            if one > load:
                break
            found |= self._levels[one].numbers
        return found

    def least(self) -> int:
        """Return the number of the worker with the least load; ties: fewest KV tokens, then the first."""
        load = self._ascending[0]
        level = self._levels[load]
        return self._first(load, level, level.numbers)

    def least_among(self, numbers: int, most: float) -> int | None:
        """Return the same among the workers in the bits of `numbers`; None: all have a load above `most`."""
        for load in self._ascending:
            if float(load) > most:
                return None
            level = self._levels[load]
            if level.numbers & numbers:
                return self._first(load, level, level.numbers & numbers)
        return None

    def _first(self, load: int, level: _Level, numbers: int) -> int:
        if not load or not numbers & (numbers - 1):  # no worker has tokens, or there is only one
            return (numbers & -numbers).bit_length() - 1
        order = level.order
        while True:
            entry: int = order[0] if numbers == level.numbers else self._least_of(numbers)
            number = entry & _NUMBERS
            now = self.candidates[number].kv_tokens << _NUMBER_BITS | number
            if now <= entry:
                return number
            del order[bisect_left(order, entry)]
            insort(order, now)
            self._entries[number] = now

    def _least_of(self, numbers: int) -> int:
        """Return the least entry of the workers in `numbers`."""
        entries, least = self._entries, -1
        while numbers:
            low = numbers & -numbers
            numbers ^= low
            entry = entries[low.bit_length() - 1]
            if least < 0 or entry < least:
                least = entry
        return least
