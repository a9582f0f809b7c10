"""Placements by load: the least loaded worker of all, or of two, and each in turn."""

from collections.abc import Sequence as Many
from typing import Final

import numpy as np

from lorrery.scheduler.core.placements.base import Candidate, Choice, least_loaded, table_of
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr

_BLOCK = 4096
_FEW = 16
"""Up to this many are drawn one by one, however few are left over: at most some sixty draws."""


class Draw:
    """Draws distinct indices at random, for placements that do not look at all workers; their order has no meaning.

    Args:
        rng: source; used in blocks, since a single draw takes numpy ten times as long.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._shares: list[float] = []

    def some(self, count: int, total: int) -> list[int]:
        """Return distinct indices below `total`: `count` of them, or all if there are no more. Cost: O(count)."""
        if count >= total:
            return list(range(total))
        if count > max(_FEW, total // 2):
            left_out = self._different(total - count, total)
            return [index for index in range(total) if index not in left_out]
        return list(self._different(count, total))

    def _different(self, count: int, total: int) -> dict[int, None]:
        """Draw indices, as keys in drawing order."""
        drawn: dict[int, None] = {}
        while len(drawn) < count:
            if not self._shares:
                self._shares = self._rng.random(_BLOCK).tolist()
            drawn[int(self._shares.pop() * total)] = None
        return drawn


MAX_EXTRA_SEQUENCES: Final = 4
MAX_LOAD_RATIO: Final = 1.25


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastLoaded:
    """Least loaded, with adapter affinity.

    The worker with the fewest sequences, unless one with the sequence's adapter on its GPU is not much fuller: at most
    `MAX_EXTRA_SEQUENCES` more, or `MAX_LOAD_RATIO` times as many. Adapters take memory on each worker that runs them,
    so keeping the requests of one adapter together leaves more of it for sequences; the bound keeps a popular adapter
    from filling one worker while others idle.
    """

    moves_waiting = True

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the least loaded worker, or one that has the adapter and is not much fuller."""
        least = least_loaded(candidates)
        if sequence.adapter is not None:
            load, adapter = least.load, sequence.adapter
            most = max(load + MAX_EXTRA_SEQUENCES, load * MAX_LOAD_RATIO)
            chosen = _least_loaded_holder(adapter, candidates, most)
            if chosen is not None:
                return Choice(chosen, f"has adapter {adapter.adapter_id}; load {chosen.load}, the least is {load}")
        return Choice(least, f"least load, {least.load}")


def _least_loaded_holder(adapter: Adapter, candidates: Many[Candidate], most: float) -> Candidate | None:
    """Return the least loaded of the workers that have an adapter, if its load is not over `most`."""
    table = table_of(candidates)
    if table is not None:
        rows = table.with_adapter(adapter)
        return None if rows is None else table.least_loaded_among(rows, most)
    holders = [one for one in candidates if one.has_adapter(adapter) and one.load <= most]
    return least_loaded(holders) if holders else None


@mypyc_attr(allow_interpreted_subclasses=True)
class RoundRobin:
    """Round robin: each worker in turn, in order of attaching, whatever its load."""

    def __init__(self) -> None:
        self._num_placed = 0

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the next worker."""
        chosen = candidates[self._num_placed % len(candidates)]
        self._num_placed += 1
        return Choice(chosen, f"turn {self._num_placed}")


@mypyc_attr(allow_interpreted_subclasses=True)
class PowerOfTwo:
    """Power of two choices: draw two workers at random, take the less loaded one (Mitzenmacher, 1996).

    Nearly as even as looking at all workers, at the price of looking at two; and several schedulers that do this do not
    all flood the same worker.

    Args:
        rng: draws the two.
    """

    moves_waiting = True

    def __init__(self, rng: np.random.Generator) -> None:
        self._draw = Draw(rng)

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Draw two workers and choose the less loaded."""
        pair = [candidates[index] for index in sorted(self._draw.some(2, len(candidates)))]
        chosen = least_loaded(pair)
        others = ", ".join(f"{candidate.name} with {candidate.load}" for candidate in pair if candidate is not chosen)
        return Choice(chosen, f"load {chosen.load}" + (f"; the other was {others}" if others else ""))
