"""Prefix match: the worker with most of the prompt cached, unless it is much fuller than the others.

As in cache-aware routers (SGLang's, llm-d's): the worker whose prefix cache holds the longest prefix of the prompt, if
its load is at most `LOAD_FACTOR` times the mean and the hit is at least `MIN_HIT_RATIO` of the prompt; otherwise the
least loaded one.

Cost: one look-up per worker; of many workers one in the tree of all their caches, and one at the chosen.
"""

from collections.abc import Sequence as Many
from typing import Final

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
