"""Somebody who watches a scheduler: takes frames, each its state and what has happened since the one before.

A driver adds what only it knows: times of steps, and what a worker is.
"""

from collections.abc import Container
from dataclasses import dataclass, replace

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.history import AdapterCounts, Ended, Happened, History, TenantCounts, Totals
from lorrery.scheduler.core.snapshot import ClusterSnapshot, Tables, Use, snapshot

MAX_ROWS = 1_000
"""Tenants and adapters that a frame lists: where there are more, those that have most."""


@dataclass(slots=True)
class TenantRow:
    """A tenant: what it has, and what it has had."""

    tenant: int
    use: Use
    output_tokens: int
    num_refused: int


@dataclass(slots=True)
class AdapterRow:
    """An adapter: what it has, and what it has had; whether it has been unloaded, so that no request may name it."""

    adapter: int
    use: Use
    counts: AdapterCounts
    unloaded: bool


@dataclass(slots=True)
class EndedRow:
    """A request that has ended, with the numbers of its adapter and its tenant."""

    ended: Ended
    adapter: int
    tenant: int


@dataclass(slots=True)
class CoreFrame:
    """What a watcher gets; `totals.output_tokens` are of all requests.

    Attributes:
        adapters_new: names that are new to the watcher, in order of their numbers.
        preempted: preemptions by worker.
        num_more_ended: requests that have ended beside those listed.
        num_more_events: events beside those listed.
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
        history: of the scheduler, which goes on with it.
        tables: that it shares with watchers of other schedulers; None: its own.
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
        # Never less than before: who is cancelled may leave a step later with what its client did not get.
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
        counts = {numbers.number(name): one for name, one in self._history.adapters.items()}
        unloaded = set() if self._known is None else set(numbers.numbers_besides(self._known))
        rows = [
            AdapterRow(adapter, uses.get(adapter) or Use(), counts.get(adapter) or AdapterCounts(), adapter in unloaded)
            for adapter in sorted({*uses, *counts, *unloaded})
        ]
        return _busiest_adapters(rows) if len(rows) > MAX_ROWS else rows


def _busiest_tenants(rows: list[TenantRow]) -> list[TenantRow]:
    rows.sort(key=lambda row: (-row.use.num_running - row.use.num_waiting, -row.output_tokens, row.tenant))
    return rows[:MAX_ROWS]


def _busiest_adapters(rows: list[AdapterRow]) -> list[AdapterRow]:
    rows.sort(key=lambda row: (-row.use.num_running - row.use.num_waiting, -row.counts.loads, row.adapter))
    return rows[:MAX_ROWS]
