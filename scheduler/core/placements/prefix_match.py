"""Prefix match: where most of the prompt is cached already, unless that worker is much fuller than the others.

As in cache-aware routers (SGLang's, llm-d's): the worker whose prefix cache holds the longest prefix of the prompt, if
its load is at most `LOAD_FACTOR` times the mean and the hit is at least `MIN_HIT_RATIO` of the prompt; otherwise the
least loaded one. Cost: one look-up per worker.
"""

from collections.abc import Sequence as Many

from lorrery.scheduler.core.placements.base import Candidate, Choice, bound_of, least_loaded, least_of
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.derivable import mypyc_attr

LOAD_FACTOR = 1.5
MIN_HIT_RATIO = 0.1


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixMatch:
    """See the module."""

    moves_waiting = True

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the worker with the longest cached prefix that is not much fuller than the others."""
        loads = [candidate.load for candidate in candidates]
        most = bound_of(loads, LOAD_FACTOR)
        longest = 0
        holders: list[Candidate] = []
        for candidate, load in zip(candidates, loads, strict=True):
            if load <= most and (hit := candidate.cached_tokens(sequence)) >= longest:
                if hit > longest:
                    longest, holders = hit, []
                holders.append(candidate)
        if longest and longest >= MIN_HIT_RATIO * sequence.input_tokens:
            chosen = least_loaded(holders)
            return Choice(chosen, f"{longest} of {sequence.input_tokens} tokens cached; load {chosen.load} of {most}")
        chosen = least_of(candidates, loads)
        return Choice(chosen, f"longest prefix has {longest} tokens; least load, {chosen.load}")
