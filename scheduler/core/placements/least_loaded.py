"""Least loaded, with adapter affinity.

The worker with the fewest sequences, unless one where the sequence's adapter is on the GPU is not much fuller: at most
`MAX_EXTRA_SEQUENCES` more, or `MAX_LOAD_RATIO` times as many. Adapters take memory on each worker that runs them, so
keeping the requests of one adapter together leaves more of it for sequences; the bound keeps a popular adapter from
filling one worker while others idle.
"""

from collections.abc import Sequence as Many

from lorrery.scheduler.core.placements.base import Candidate, Choice, least_loaded
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.derivable import mypyc_attr

MAX_EXTRA_SEQUENCES = 4
MAX_LOAD_RATIO = 1.25


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastLoaded:
    """See the module."""

    moves_waiting = True

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the least loaded worker, or one that has the adapter and is not much fuller."""
        least = least_loaded(candidates)
        if sequence.adapter is not None:
            load, adapter = least.load, sequence.adapter
            most = max(load + MAX_EXTRA_SEQUENCES, load * MAX_LOAD_RATIO)
            holders = [c for c in candidates if c.has_adapter(adapter) and c.load <= most]
            if holders:
                chosen = least_loaded(holders)
                return Choice(chosen, f"has adapter {adapter.adapter_id}; load {chosen.load}, the least is {load}")
        return Choice(least, f"least load, {least.load}")
