"""Adapter events of one worker: begin and end of loads, activations, evictions.

A driver that wants them sets `Residency.log`, and takes the events after each decision and each commit. Without a log
nothing is recorded. No decision depends on it.
"""

from dataclasses import dataclass

from lorrery.scheduler.core.sequence import Adapter
from lorrery.vocabulary.units import PS_PER_SECOND

THRASH_PS = 60 * PS_PER_SECOND
"""An adapter that is loaded again within this time after its eviction thrashes."""


@dataclass(frozen=True, slots=True)
class LoadBegan:
    """A load onto the GPU has begun.

    Attributes:
        tier: source of the load: `host` or `disk`.
        thrash: the adapter was evicted from this GPU within a minute before.
    """

    adapter: Adapter
    tier: str
    at_ps: int
    thrash: bool


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended, `took_ps` after it began; one that failed may be tried again."""

    adapter: Adapter
    tier: str
    at_ps: int
    took_ps: int
    failed: bool


@dataclass(frozen=True, slots=True)
class Evicted:
    """An adapter has left a level of memory: `gpu` or `host`."""

    adapter: Adapter
    level: str
    at_ps: int


@dataclass(frozen=True, slots=True)
class Activated:
    """An adapter that a load had brought into host memory alone has got a place on the GPU."""

    adapter: Adapter
    at_ps: int


AdapterEvent = LoadBegan | LoadEnded | Evicted | Activated


class AdapterLog:
    """The events of one worker since they were last taken, in order."""

    def __init__(self) -> None:
        self._events: list[AdapterEvent] = []
        self._evicted_ps: dict[str, int] = {}  # GPU evictions by key, oldest first; of the last minute or a bit more

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
        self._events.append(Activated(adapter, at_ps))

    def load_ended(self, adapter: Adapter, tier: str, at_ps: int, took_ps: int, *, failed: bool) -> None:
        """Record the end of a load."""
        self._events.append(LoadEnded(adapter, tier, at_ps, took_ps, failed))

    def evicted(self, adapter: Adapter, level: str, at_ps: int) -> None:
        """Record an eviction."""
        self._events.append(Evicted(adapter, level, at_ps))
        if level != "gpu":
            return
        evicted = self._evicted_ps
        evicted.pop(adapter.key, None)
        evicted[adapter.key] = at_ps
        while at_ps - evicted[oldest := next(iter(evicted))] > THRASH_PS:
            del evicted[oldest]
