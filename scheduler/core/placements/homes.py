"""The few workers that a placement looks at: an adapter's homes, and some drawn at random.

An adapter's homes are the first `num_homes` of its ranking by rendezvous hash. If none of them has room, that is a load
of at most `LOAD_FACTOR` times the mean (consistent hashing with bounded loads; Mirrokni, Thorup and Zadimoghaddam, SODA
2018), the next in the ranking that has room is one too: so a popular adapter has as many homes as it needs, always the
same ones, up to `MOST_HOMES`; beyond, its requests go to the workers drawn. The mean is estimated from the workers
drawn, over about the last `MEMORY` requests. So the cost of a placement grows neither with workers nor with adapters.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from lorrery.scheduler.core.placements.base import Candidate
from lorrery.scheduler.core.placements.draw import Draw
from lorrery.scheduler.core.placements.options import PlacementOptions
from lorrery.scheduler.core.placements.rendezvous import Rankings
from lorrery.scheduler.core.sequence import Adapter

LOAD_FACTOR = 1.25
MEMORY = 32
MOST_HOMES = 32
"""Depth in a ranking to which room is looked for."""


@dataclass(frozen=True, slots=True)
class LookedAt:
    """The workers to consider for one request.

    Attributes:
        homes: of its adapter, in order of its ranking; empty for the base model.
        drawn: at random.
        most: the load up to which a worker has room.
    """

    homes: list[Candidate]
    drawn: list[Candidate]
    most: int


class Homes:
    """See the module.

    Args:
        rng: draws workers.
        options: how many homes, and how many workers to draw.
    """

    def __init__(self, rng: np.random.Generator, options: PlacementOptions) -> None:
        self._draw = Draw(rng)
        self._num_homes = options.num_homes
        self._num_drawn = options.num_drawn
        self._rankings = Rankings(max(options.num_homes, MOST_HOMES))
        self._mean_load = 0.0
        self._num_sampled = 0

    def look(self, adapter: Adapter | None, candidates: Many[Candidate]) -> LookedAt:
        """Return the workers to consider for a request with this adapter."""
        drawn = [candidates[index] for index in self._draw.some(self._num_drawn, len(candidates))]
        sampled = sum([candidate.load for candidate in drawn]) / len(drawn)
        self._num_sampled += 1
        self._mean_load += (sampled - self._mean_load) / min(self._num_sampled, MEMORY)
        most = int(LOAD_FACTOR * (self._mean_load + 1))
        if adapter is None:
            return LookedAt([], drawn, most)
        homes: list[Candidate] = []
        has_room = False
        for place, index in enumerate(self._rankings.head(adapter.adapter_id, candidates)):
            if place >= self._num_homes and has_room:
                break
            home = candidates[index]
            here = home.load <= most
            if place < self._num_homes or here:
                homes.append(home)
            has_room = has_room or here
        return LookedAt(homes, drawn, most)
