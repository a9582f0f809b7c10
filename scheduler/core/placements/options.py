"""Settings of the placements that can be tuned."""

from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight of each score of `weighted`; 0: the score is not used, and its figures are not read."""

    queue: float = 2.0
    load: float = 2.0
    adapter: float = 4.0
    prefix: float = 3.0


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Options of `adapter_shards` and `weighted`.

    Attributes:
        num_homes: workers that an adapter is sharded over.
        num_drawn: workers drawn at random for each request.
        weights: of the scores.
        max_load: load of a worker, as a multiple of the mean, above which its scores do not count.
    """

    num_homes: int = 2
    num_drawn: int = 2
    weights: Weights = field(default_factory=Weights)
    max_load: float = inf


DEFAULT_OPTIONS = PlacementOptions(max_load=2.0)
