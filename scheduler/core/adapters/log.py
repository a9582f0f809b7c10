"""Adapter events of one worker: begin and end of loads, activations, evictions.

A driver that wants them sets `Residency.log`, and takes the events after each decision and each commit. Without a log
nothing is recorded. No decision depends on it. Stays on the GPU are counted from then on.
"""

from collections import OrderedDict

from lorrery.scheduler.core.facts import Activated, AdapterEvent, AdapterLost, Evicted, LoadBegan, LoadEnded
from lorrery.scheduler.core.sequence import Adapter
from lorrery.vocabulary.units import PS_PER_SECOND

THRASH_PS = 60 * PS_PER_SECOND
"""An adapter that is loaded again within this time after its eviction thrashes."""


class AdapterLog:
    """The events of one worker since they were last taken, in order.

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
