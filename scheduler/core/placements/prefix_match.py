"""Prefix match: where most of the prompt is cached already, unless that worker is much fuller than the others.

As in cache-aware routers (SGLang's, llm-d's): the worker whose prefix cache holds the longest prefix of the prompt, if
its load is at most `LOAD_FACTOR` times the mean and the hit is at least `MIN_HIT_RATIO` of the prompt; otherwise the
least loaded one. Cost: one look-up per worker.
"""

from collections.abc import Sequence as Many

from lorrery.scheduler.core.placements.base import Candidate, Choice, least_loaded, load_bound
from lorrery.scheduler.core.sequence import Sequence

LOAD_FACTOR = 1.5
MIN_HIT_RATIO = 0.1


class PrefixMatch:
    """See the module."""

    moves_waiting = True

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the worker with the longest cached prefix that is not much fuller than the others."""
        most = load_bound(candidates, LOAD_FACTOR)
        hits = [(candidate.cached_tokens(sequence), candidate) for candidate in candidates if candidate.load <= most]
        longest = max((hit for hit, _ in hits), default=0)
        if longest and longest >= MIN_HIT_RATIO * sequence.input_tokens:
            chosen = least_loaded([candidate for hit, candidate in hits if hit == longest])
            return Choice(chosen, f"{longest} of {sequence.input_tokens} tokens cached; load {chosen.load} of {most}")
        chosen = least_loaded(candidates)
        return Choice(chosen, f"longest prefix has {longest} tokens; least load, {chosen.load}")
