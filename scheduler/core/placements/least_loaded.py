"""Least loaded, with adapter affinity.

The worker with the fewest sequences, unless one with the sequence's adapter on its GPU is not much fuller: at most
`MAX_EXTRA_SEQUENCES` more, or `MAX_LOAD_RATIO` times as many. Adapters take memory on each worker that runs them, so
keeping the requests of one adapter together leaves more of it for sequences; the bound keeps a popular adapter from
filling one worker while others idle.
"""

from collections.abc import Sequence as Many
from typing import Final

from lorrery.scheduler.core.placements.base import Candidate, Choice, least_loaded, table_of
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr

MAX_EXTRA_SEQUENCES: Final = 4
MAX_LOAD_RATIO: Final = 1.25


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
