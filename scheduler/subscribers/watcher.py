"""A watcher of a scheduler: takes frames, each with the current state and what happened since the one before.

A driver adds what only it knows: step times, and properties of a worker.
"""

from collections.abc import Container
from dataclasses import dataclass, replace

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.subscribers.history import Ended, Happened, History, TenantCounts, Totals
from lorrery.scheduler.subscribers.snapshot import ClusterSnapshot, Tables, Use, snapshot
from lorrery.vocabulary.adapters import AdapterFigures

MAX_ROWS = 1_000
"""Most tenants and adapters in a frame: the busiest ones, if there are more."""


@dataclass(slots=True)
class TenantRow:
    """A tenant: current use and totals."""

    tenant: int
    use: Use
    output_tokens: int
    num_refused: int


@dataclass(slots=True)
class AdapterRow:
    """An adapter: current use and totals; `unloaded`: no request may name it any more."""

    adapter: int
    use: Use
    counts: AdapterFigures
    unloaded: bool


@dataclass(slots=True)
class EndedRow:
    """A request that has ended, with the numbers of its adapter and its tenant."""

    ended: Ended
    adapter: int
    tenant: int


@dataclass(slots=True)
class CoreFrame:
    """One frame of a watcher; `totals.output_tokens` counts all requests.

    Attributes:
        adapters_new: names that are new to the watcher, in order of their numbers.
        preempted: preemptions by worker.
        num_more_ended: ended requests that are not listed.
        num_more_events: events that are not listed.
    """

    now: ClusterSnapshot
    adapters_new: list[str]
    tenants_new: list[str]
    tenants: list[TenantRow]
    adapters: list[AdapterRow]
    totals: Totals
    preempted: dict[str, int]
    ended: list[EndedRow]
    num_more_ended: int
    events: list[Happened]
    num_more_events: int


class Watcher:
    """See the module.

    Args:
        history: of the scheduler, which keeps updating it.
        tables: shared with watchers of other schedulers; None: its own.
        known: names of the adapters that are loaded now; None: none is ever unloaded.
    """

    def __init__(self, history: History, tables: Tables | None = None, known: Container[str] | None = None) -> None:
        self._history = history
        self._known = known
        self._tables = tables or Tables()
        self._seen = history.begin()
        self._output_tokens = 0

    def frame(self, core: ClusterCore, at_ps: int) -> CoreFrame:
        """Take the next frame."""
        history, tables = self._history, self._tables
        now = snapshot(core, tables, at_ps)
        tenants = self._tenants(now.tenants)
        adapters = self._adapters(now.adapters)
        ended, num_more_ended = history.take_ended(self._seen)
        rows = [EndedRow(one, tables.adapter(one.adapter_id), tables.tenants.number(one.tenant_id)) for one in ended]
        events, num_more_events = history.take_events(self._seen)
        open_tokens = sum([use.output_tokens for use in now.adapters.values()])
        # Never less than before: a cancelled sequence may leave a step later, with tokens that its client did not get.
        self._output_tokens = max(self._output_tokens, history.totals.output_tokens + open_tokens)
        totals = replace(history.totals, output_tokens=self._output_tokens)
        return CoreFrame(
            now,
            tables.adapters.take_new(),
            tables.tenants.take_new(),
            tenants,
            adapters,
            totals,
            history.preempted,
            rows,
            num_more_ended,
            events,
            num_more_events,
        )

    def _tenants(self, uses: dict[int, Use]) -> list[TenantRow]:
        numbers = self._tables.tenants
        counts = {numbers.number(name): one for name, one in self._history.tenants.items()}
        rows = []
        for tenant in sorted({*uses, *counts}):
            use, had = uses.get(tenant) or Use(), counts.get(tenant) or TenantCounts()
            rows.append(TenantRow(tenant, use, max(0, had.output_tokens + use.output_tokens), had.refused))
        return _busiest_tenants(rows) if len(rows) > MAX_ROWS else rows

    def _adapters(self, uses: dict[int, Use]) -> list[AdapterRow]:
        numbers = self._tables.adapters
        counts = {numbers.number(name): one for name, one in self._history.adapters.by_adapter.items()}
        unloaded = set() if self._known is None else set(numbers.numbers_besides(self._known))
        rows = []
        for adapter in sorted({*uses, *counts, *unloaded}):
            use, had = uses.get(adapter) or Use(), counts.get(adapter) or AdapterFigures()
            rows.append(AdapterRow(adapter, use, had, adapter in unloaded))
        return _busiest_adapters(rows) if len(rows) > MAX_ROWS else rows


def _busiest_tenants(rows: list[TenantRow]) -> list[TenantRow]:
    rows.sort(key=lambda row: (-row.use.num_running - row.use.num_waiting, -row.output_tokens, row.tenant))
    return rows[:MAX_ROWS]


def _busiest_adapters(rows: list[AdapterRow]) -> list[AdapterRow]:
    rows.sort(key=lambda row: (-row.use.num_running - row.use.num_waiting, -row.counts.num_loads, row.adapter))
    return rows[:MAX_ROWS]
