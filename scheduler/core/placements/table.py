"""Placements by the names that settings use, with their builders."""

from typing import Protocol

import numpy as np

from lorrery.scheduler.core.placements.adapter_hash import AdapterHash
from lorrery.scheduler.core.placements.adapter_shards import AdapterShards
from lorrery.scheduler.core.placements.least_loaded import LeastLoaded
from lorrery.scheduler.core.placements.options import DEFAULT_OPTIONS, PlacementOptions
from lorrery.scheduler.core.placements.power_of_two import PowerOfTwo
from lorrery.scheduler.core.placements.predicted_finish import PredictedFinish
from lorrery.scheduler.core.placements.prefix_match import PrefixMatch
from lorrery.scheduler.core.placements.round_robin import RoundRobin
from lorrery.scheduler.core.placements.weighted import Weighted
from lorrery.scheduler.core.protocols.placement import Placement


class MakePlacement(Protocol):
    """Builds a placement."""

    def __call__(self, rng: np.random.Generator, options: PlacementOptions = DEFAULT_OPTIONS) -> Placement:
        """Return a new placement that draws from `rng`; most have no options."""
        ...


PLACEMENTS: dict[str, MakePlacement] = {
    "least_loaded": lambda rng, options=DEFAULT_OPTIONS: LeastLoaded(),
    "round_robin": lambda rng, options=DEFAULT_OPTIONS: RoundRobin(),
    "adapter_hash": lambda rng, options=DEFAULT_OPTIONS: AdapterHash(),
    "adapter_shards": AdapterShards,
    "prefix_match": lambda rng, options=DEFAULT_OPTIONS: PrefixMatch(),
    "power_of_two": lambda rng, options=DEFAULT_OPTIONS: PowerOfTwo(rng),
    "predicted_finish": lambda rng, options=DEFAULT_OPTIONS: PredictedFinish(),
    "weighted": Weighted,
}
