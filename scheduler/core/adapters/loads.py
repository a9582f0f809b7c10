"""Loads of adapters onto a GPU: their source, their duration, their faults, and the log of what happened."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Final

from lorrery.scheduler.core.facts import Activated, AdapterEvent, AdapterLost, Evicted, LoadBegan, LoadEnded
from lorrery.scheduler.core.sequence import Adapter
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.catalogue.architecture import Model
from lorrery.worker.device.deployment import kv_bytes_per_token
from lorrery.worker.device.lora import Targets, adapter_bytes, load_ps


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


THRASH_PS = 60 * PS_PER_SECOND
"""An adapter that is loaded again within this time after its eviction thrashes."""


class AdapterLog:
    """Adapter events of one worker since they were last taken, in order: loads, activations, evictions.

    A driver that wants them sets `Residency.log`, and takes the events after each decision and each commit. Without a
    log nothing is recorded. No decision depends on it. Stays on the GPU are counted from then on.

    Attributes:
        stays: adapters on the GPU, by key, each with the end of its load.
    """

    def __init__(self) -> None:
        self.stays: dict[str, tuple[Adapter, int]] = {}
        self._events: list[AdapterEvent] = []
        # GPU evictions by key, oldest first; of the last minute or a bit more. A plain dict looks for its first key
        # past all that were deleted before it.
        self._evicted_ps: OrderedDict[str, int] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        """Whether all events have been taken."""
        return not self._events

    def take(self) -> list[AdapterEvent]:
        """Return, once, the events since the last call."""
        events = self._events
        if events:
            self._events = []
        return events

    def load_began(self, adapter: Adapter, tier: str, at_ps: int) -> None:
        """Record the begin of a load."""
        evicted_ps = self._evicted_ps.get(adapter.key)
        thrash = evicted_ps is not None and at_ps - evicted_ps <= THRASH_PS
        self._events.append(LoadBegan(adapter, tier, at_ps, thrash))

    def activated(self, adapter: Adapter, at_ps: int) -> None:
        """Record that an adapter has got a place after its load."""
        self.stays[adapter.key] = adapter, at_ps
        self._events.append(Activated(adapter, at_ps))

    def load_ended(
        self, adapter: Adapter, tier: str, at_ps: int, took_ps: int, *, failed: bool, in_place: bool = True
    ) -> None:
        """Record the end of a load; `in_place`: it ended on the GPU, not in host memory."""
        if in_place and not failed:
            self.stays[adapter.key] = adapter, at_ps
        self._events.append(LoadEnded(adapter, tier, at_ps, took_ps, failed))

    def evicted(self, adapter: Adapter, level: str, at_ps: int) -> None:
        """Record an eviction."""
        if level != "gpu":
            self._events.append(Evicted(adapter, level, at_ps))
            return
        _, since_ps = self.stays.pop(adapter.key, (adapter, at_ps))
        self._events.append(Evicted(adapter, level, at_ps, at_ps - since_ps))
        evicted = self._evicted_ps
        evicted.pop(adapter.key, None)
        evicted[adapter.key] = at_ps
        while at_ps - evicted[oldest := next(iter(evicted))] > THRASH_PS:
            del evicted[oldest]

    def lost(self, at_ps: int) -> None:
        """Record the loss of the worker, with all that its GPU has."""
        self._events += [
            AdapterLost(adapter, at_ps, max(0, at_ps - since_ps)) for adapter, since_ps in self.stays.values()
        ]
        self.stays.clear()
