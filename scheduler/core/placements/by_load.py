"""Placements by load: the least loaded worker, unless another has the adapter or the prompt; of two; each in turn."""

from collections.abc import Sequence as Many
from typing import Final

import numpy as np

from lorrery.scheduler.core.placements.base import (
    Candidate,
    Choice,
    bound_given,
    bound_of,
    least_loaded,
    least_of,
    table_of,
)
from lorrery.scheduler.core.placements.worker_table import WorkerTable
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


LOAD_FACTOR: Final = 1.5
MIN_HIT_RATIO: Final = 0.1


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixMatch:
    """Prefix match: the worker with most of the prompt cached, unless it is much fuller than the others.

    As in cache-aware routers (SGLang's, llm-d's): the worker whose prefix cache holds the longest prefix of the prompt,
    if its load is at most `LOAD_FACTOR` times the mean and the hit is at least `MIN_HIT_RATIO` of the prompt; otherwise
    the least loaded one.

    Cost: one look-up per worker; of many workers one in the tree of all their caches, and one at the chosen.
    """

    moves_waiting = True
    asks_all = True

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the worker with the longest cached prefix that is not much fuller than the others."""
        table = table_of(candidates)
        if table is not None and (choice := _choose_of_many(sequence, table)) is not None:
            return choice
        loads = [candidate.load for candidate in candidates]
        most = bound_of(loads, LOAD_FACTOR)
        longest = 0
        holders: list[Candidate] = []
        for number, load in enumerate(loads):
            if load > most:
                continue
            candidate = candidates[number]
            hit = candidate.cached_tokens(sequence)
            if hit < longest:
                continue
            if hit > longest:
                longest, holders = hit, []
            holders.append(candidate)
        if longest and longest >= MIN_HIT_RATIO * sequence.input_tokens:
            return _matched(least_loaded(holders), sequence, longest, most)
        return _least(least_of(candidates, loads), longest)


def _matched(chosen: Candidate, sequence: Sequence, longest: int, most: int) -> Choice:
    return Choice(chosen, f"{longest} of {sequence.input_tokens} tokens cached; load {chosen.load} of {most}")


def _least(chosen: Candidate, longest: int) -> Choice:
    return Choice(chosen, f"longest prefix has {longest} tokens; least load, {chosen.load}")


def _choose_of_many(sequence: Sequence, table: WorkerTable) -> Choice | None:
    """Choose by the columns of many workers; None: their prefix caches are not of one kind."""
    most = bound_given(table.total_load, table.least_load, len(table.candidates), LOAD_FACTOR)
    for _ in table.candidates:  # each turn brings another one up to date
        held = table.holders(sequence)
        if held is None:
            return None
        longest, chosen = 0, None
        for tokens, numbers in reversed(held):
            chosen = table.least_loaded_among(table.rows(numbers), most)
            if chosen is not None:
                longest = tokens
                break
        if chosen is None:
            return _least(table.least_loaded(), 0)
        if chosen.cached_tokens(sequence) == longest:
            if longest >= MIN_HIT_RATIO * sequence.input_tokens:
                return _matched(chosen, sequence, longest, most)
            return _least(table.least_loaded(), longest)
        # Its cache has evicted blocks in steps that were committed only now, and has updated the tree.
    return None
