"""Adapters sharded over k workers each: the less loaded of an adapter's homes, within a bound.

`homes` gives the homes, the bound and the workers drawn. With two homes this is the power of two choices among them. A
request whose homes have no room goes to the least loaded of the workers drawn, as requests for the base model do.
"""

from collections.abc import Sequence as Many

import numpy as np

from lorrery.scheduler.core.placements.base import Candidate, Choice, least_loaded
from lorrery.scheduler.core.placements.homes import Homes
from lorrery.scheduler.core.placements.options import DEFAULT_OPTIONS, PlacementOptions
from lorrery.scheduler.core.sequence import Sequence


class AdapterShards:
    """See the module.

    Args:
        rng: draws workers.
        options: how many homes, and how many workers to draw.
    """

    moves_waiting = True

    def __init__(self, rng: np.random.Generator, options: PlacementOptions = DEFAULT_OPTIONS) -> None:
        self._homes = Homes(rng, options)

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the least loaded home that has room."""
        seen = self._homes.look(sequence.adapter, candidates)
        if sequence.adapter is None:
            chosen = least_loaded(seen.drawn)
            return Choice(chosen, f"no adapter; load {chosen.load}, the least of {len(seen.drawn)}")
        name = sequence.adapter.adapter_id
        chosen = least_loaded(seen.homes)
        load = chosen.load
        if load <= seen.most:
            return Choice(chosen, f"load {load} of {seen.most}, the least of {len(seen.homes)} homes of {name}")
        chosen = least_loaded(seen.drawn)
        return Choice(chosen, f"no home of {name} has room for more than {seen.most}; load {chosen.load}")
