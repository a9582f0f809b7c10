"""Loads of adapters onto a GPU: their source, their duration, and their faults."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Final

from lorrery.scheduler.core.sequence import Adapter
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.worker.device.architecture import Model
from lorrery.worker.device.lora import Targets, adapter_bytes, load_ps
from lorrery.worker.device.memory import kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Rules of residency.

    Attributes:
        max_loras: places on the GPU; None: see `max_slots`.
        max_slots: if `max_loras` is None: pool slots for all adapters on the GPU together; a single one may exceed it.
            None: bounded only by the sequences that use them, as in strict S-LoRA, which keeps no others.
        max_cpu_loras: places in host memory; None: all that were ever read.
        max_concurrent_loads: loads that run at once.
        max_load_attempts: how often a load is tried.
        blocking: the prefill step waits for the load, instead of the sequence in the queue.
        keep_unused: keep unused adapters until their place is needed.
        keep_unloaded: likewise those that no new request can name.
    """

    max_loras: int | None = None
    max_slots: int | None = None
    max_cpu_loras: int | None = None
    max_concurrent_loads: int = 4
    max_load_attempts: int = 3
    blocking: bool = False
    keep_unused: bool = True
    keep_unloaded: bool = False


DEFAULT = AdapterOptions()


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


@dataclass(frozen=True, slots=True)
class AdapterCosts:
    """Costs of the adapters of one base model.

    Attributes:
        model: the base model.
        target_modules: the projections that adapters change: "qkvo" or "all-linear".
        host_gb_per_second: rate from pinned host memory.
        disk_gb_per_second: rate from disk.

    Raises:
        CatalogueError: by every method, if such adapters of this model are not modelled.
    """

    model: Model
    target_modules: Targets
    host_gb_per_second: float
    disk_gb_per_second: float
    _load_ps: dict[tuple[int, bool], int] = field(default_factory=dict, repr=False, compare=False)
    """By rank, and whether from disk: placements ask for it at each request, of each worker that they consider."""

    def size_bytes(self, rank: int) -> int:
        """Return the size of an adapter."""
        return adapter_bytes(self.model, rank, self.target_modules)

    def exact_slots(self, rank: int) -> int:
        """Return the number of tokens whose KV takes as much memory as the adapter, rounded up."""
        return -(-self.size_bytes(rank) // kv_bytes_per_token(self.model))

    def load_ps(self, adapter: Adapter, tier: Tier) -> int:
        """Return how long a load from a tier takes, in picoseconds."""
        from_disk = tier is Tier.DISK
        known = self._load_ps.get((adapter.rank, from_disk))
        if known is None:
            size, disk = self.size_bytes(adapter.rank), self.disk_gb_per_second if from_disk else None
            known = load_ps(self.model, size, self.host_gb_per_second, disk)
            self._load_ps[adapter.rank, from_disk] = known
        return known


class Ahead:
    """Adapters that will be needed next, in order of need, and how many of them need no further check.

    While the front of the queue stays the same, a residency has to load the same adapters ahead at every decision, and
    most of them are already on the GPU or loading.

    Attributes:
        adapters: distinct, in order.
        by_key: the same adapters, by key.
        num_there: length of the prefix of `adapters` that was on the GPU or loading at the last check.
        as_of: by which the residency tells whether `num_there` still holds.
    """

    __slots__ = ("adapters", "as_of", "by_key", "num_there")

    def __init__(self, adapters: Iterable[Adapter]) -> None:
        self.by_key = {adapter.key: adapter for adapter in adapters}
        self.adapters = list(self.by_key.values())
        self.num_there, self.as_of = 0, -1
