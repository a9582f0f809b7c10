"""Prefix match: the worker with most of the prompt cached, unless it is much fuller than the others.

As in cache-aware routers (SGLang's, llm-d's): the worker whose prefix cache holds the longest prefix of the prompt, if
its load is at most `LOAD_FACTOR` times the mean and the hit is at least `MIN_HIT_RATIO` of the prompt; otherwise the
least loaded one.

Cost: one look-up per worker; of many workers one in their common index (`core.many_workers`), and one at the chosen.
"""

from collections.abc import Sequence as Many
from typing import Final

from lorrery.scheduler.core.many_workers import ManyWorkers
from lorrery.scheduler.core.placements.base import (
    Candidate,
    Choice,
    bound_given,
    bound_of,
    kept_of,
    least_loaded,
    least_of,
)
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr

LOAD_FACTOR: Final = 1.5
MIN_HIT_RATIO: Final = 0.1


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixMatch:
    """See the module."""

    moves_waiting = True
    asks_all = True

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the worker with the longest cached prefix that is not much fuller than the others."""
        many = kept_of(candidates)
        if many is not None and (choice := _choose_of_many(sequence, many)) is not None:
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


def _choose_of_many(sequence: Sequence, many: ManyWorkers) -> Choice | None:
    """Choose by the index of many workers; None: their prefix caches are not of one kind."""
    loads = many.loads
    most = bound_given(loads.total, loads.least_load, len(many.candidates), LOAD_FACTOR)
    within = loads.with_at_most(most)
    for _ in many.candidates:  # each turn brings another one up to date
        way = many.holders(sequence)
        if way is None:
            return None
        longest, holders = 0, 0
        for tokens, numbers in reversed(way):
            holders = numbers & within
            if holders:
                longest = tokens
                break
        if not longest:
            return _least(many.least(), 0)
        chosen = many.least_among(holders, most)
        assert chosen is not None
        if chosen.cached_tokens(sequence) == longest:
            if longest >= MIN_HIT_RATIO * sequence.input_tokens:
                return _matched(chosen, sequence, longest, most)
            return _least(many.least(), longest)
        # Its cache has evicted blocks in steps that were committed only now, and has updated the index.
    return None
