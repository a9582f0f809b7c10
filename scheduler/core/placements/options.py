"""What settings say of the placements that can be tuned."""

from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each score of `weighted` counts; 0: not at all, and what it needs is not looked up."""

    queue: float = 2.0
    load: float = 2.0
    adapter: float = 4.0
    prefix: float = 3.0


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Of `adapter_shards` and `weighted`.

    Attributes:
        num_homes: workers that an adapter is sharded over.
        num_drawn: workers drawn at random for each request.
        weights: of scores.
        max_load: times the mean that a worker's load may be so that its scores count.
    """

    num_homes: int = 2
    num_drawn: int = 2
    weights: Weights = field(default_factory=Weights)
    max_load: float = inf


DEFAULT_OPTIONS = PlacementOptions(max_load=2.0)
