"""Placements by the names that settings use, and what builds each from a generator of chance."""

from collections.abc import Callable

import numpy as np

from lorrery.scheduler.core.placements.adapter_hash import AdapterHash
from lorrery.scheduler.core.placements.base import Placement
from lorrery.scheduler.core.placements.least_loaded import LeastLoaded
from lorrery.scheduler.core.placements.power_of_two import PowerOfTwo
from lorrery.scheduler.core.placements.predicted_finish import PredictedFinish
from lorrery.scheduler.core.placements.prefix_match import PrefixMatch
from lorrery.scheduler.core.placements.round_robin import RoundRobin

PLACEMENTS: dict[str, Callable[[np.random.Generator], Placement]] = {
    "least_loaded": lambda rng: LeastLoaded(),
    "round_robin": lambda rng: RoundRobin(),
    "adapter_hash": lambda rng: AdapterHash(),
    "prefix_match": lambda rng: PrefixMatch(),
    "power_of_two": PowerOfTwo,
    "predicted_finish": lambda rng: PredictedFinish(),
}
