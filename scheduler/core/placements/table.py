"""The protocol of placements, and those of the tree by the names that settings use, with their builders.

Not compiled, since no class outside could derive from a compiled protocol.
"""

from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np

from lorrery.scheduler.core.placements.base import Candidate, Choice
from lorrery.scheduler.core.placements.by_adapter import (
    DEFAULT_OPTIONS,
    AdapterHash,
    AdapterShards,
    PlacementOptions,
    Weighted,
)
from lorrery.scheduler.core.placements.by_load import LeastLoaded, PowerOfTwo, PrefixMatch, RoundRobin
from lorrery.scheduler.core.placements.predicted_finish import PredictedFinish
from lorrery.scheduler.core.sequence import Sequence


class Placement(Protocol):
    """Chooses a worker, by the candidates' figures, its earlier choices, and the generator that it was made with.

    If it has a true attribute `moves_waiting`, waiting sequences that it has placed may move to another worker where
    they would start earlier. Candidates keep the figures from `pace` on only for a placement with a true
    attribute `predicts`; for others, reading them is an error that says so. A placement with `predicts`, or with a
    true attribute `asks_all`, is taken to read figures that change with each step of all candidates, so that a driver
    whose replicas lag behind its clock brings them all up to date at once, and not each one when it is read.
    """

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose one of the candidates, of which there is at least one, in order of attaching.

        It must not change its arguments, only its own state.
        """
        ...


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
