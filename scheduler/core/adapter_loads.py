"""Loads of adapters onto a GPU: their source, their duration, and their faults."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Final

from lorrery.scheduler.core.sequence import Adapter
from lorrery.vocabulary.compiling import mypyc_attr


class Tier(Enum):
    """Where an adapter's weights are."""

    HOST = "host"
    DISK = "disk"


LoadTime = Callable[[Adapter, Tier], int]
"""How long a load from a tier takes, in picoseconds."""


@dataclass(frozen=True, slots=True)
class LoadFault:
    """A fault of a load.

    Attributes:
        fails: whether the load fails at its end.
        factor: factor on the duration, rounded down.
    """

    fails: bool = False
    factor: Fraction = Fraction(1)


WELL: Final = LoadFault()

LoadFaults = Callable[[Adapter, int, int], LoadFault]
"""The fault of the n-th load (from 0) of an adapter, which begins at a time in picoseconds."""


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Load:
    """A running load, with its begin, its end, and whether it fails then."""

    adapter: Adapter
    tier: Tier
    began_ps: int
    ready_ps: int
    fails: bool

    def __init__(self, adapter: Adapter, tier: Tier, began_ps: int, ready_ps: int, fails: bool) -> None:
        self.adapter = adapter
        self.tier = tier
        self.began_ps = began_ps
        self.ready_ps = ready_ps
        self.fails = fails
