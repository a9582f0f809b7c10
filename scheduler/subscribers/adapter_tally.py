"""Figures of adapters, counted from the events of the workers' adapters: the same for both drivers.

Memory is bounded by `snapshot.MAX_NAMES` adapters; later ones count together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from lorrery.scheduler.core.adapters.loads import AdapterLog
from lorrery.scheduler.core.facts import AdapterEvent, AdapterLost, Evicted, Handler, LoadBegan, LoadEnded
from lorrery.scheduler.subscribers.snapshot import MAX_NAMES, OTHERS
from lorrery.vocabulary.adapter_figures import AdapterFigures


def count(figures: AdapterFigures, event: AdapterEvent) -> None:
    """Count an event of an adapter."""
    if isinstance(event, LoadBegan):
        figures.num_thrashes += event.thrash
    elif isinstance(event, LoadEnded):
        figures.num_loads += 1
        figures.num_failed_loads += event.failed
        if event.tier == "host":
            figures.host_load_ps += event.took_ps
        else:
            figures.disk_load_ps += event.took_ps
    elif isinstance(event, Evicted):
        if event.level == "gpu":
            figures.num_evictions += 1
            figures.resident_ps += event.stayed_ps
    elif isinstance(event, AdapterLost):
        figures.resident_ps += event.stayed_ps


class AdapterTally:
    """The figures of one scheduler's adapters by id, without the present stays on GPUs."""

    def __init__(self) -> None:
        self.by_adapter: dict[str, AdapterFigures] = {}

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return dict.fromkeys((LoadBegan, LoadEnded, Evicted, AdapterLost), self._take)

    def _take(self, fact: AdapterEvent, at_ps: int, member: object) -> None:
        self.count(fact)

    def count(self, fact: AdapterEvent) -> None:
        """Count a fact of an adapter."""
        count(_of(self.by_adapter, fact.adapter.adapter_id), fact)

    def forget(self, adapter_id: str) -> None:
        """Drop the figures of an adapter."""
        self.by_adapter.pop(adapter_id, None)

    def read(self, logs: Iterable[AdapterLog | None], at_ps: int) -> dict[str, AdapterFigures]:
        """Return a copy of the figures, with the present stays until now.

        Args:
            logs: of the attached workers, whose events have been recorded.
            at_ps: now.
        """
        found = {adapter_id: replace(figures) for adapter_id, figures in self.by_adapter.items()}
        for log in logs:
            for adapter, since_ps in () if log is None else log.stays.values():
                _of(found, adapter.adapter_id).resident_ps += max(0, at_ps - since_ps)
        return found


def _of(by_adapter: dict[str, AdapterFigures], adapter_id: str) -> AdapterFigures:
    figures = by_adapter.get(adapter_id)
    if figures is None:
        name = adapter_id if len(by_adapter) < MAX_NAMES else OTHERS
        figures = by_adapter.setdefault(name, AdapterFigures())
    return figures
