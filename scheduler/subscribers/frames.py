"""Frames for watchers of a scheduler: the state at one moment, and what happened since the frame before.

A snapshot is a pure function of the core's state. It costs one visit per open request, and nothing without watchers.
Adapters and tenants are numbers in tables of names that the caller keeps, so that each name is sent once. A driver adds
what only it knows: step times, and properties of a worker.
"""

from collections.abc import Container
from dataclasses import dataclass, replace

from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.subscribers.history import (
    MAX_NAMES,
    OTHERS,
    Ended,
    Happened,
    History,
    Missing,
    TenantCounts,
    Totals,
)
from lorrery.vocabulary.adapters import AdapterFigures

BASE_MODEL = -1
"""Adapter number of requests for the base model."""
ON_GPU, IN_USE, LOADING = 0, 1, 2
"""States of an adapter on a worker."""


class Names:
    """A table of names, numbered in order of appearance."""

    __slots__ = ("_new", "_number")

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._new: list[str] = []

    def number(self, name: str) -> int:
        """Return a name's number, a new one if needed."""
        number = self._number.get(name)
        return self._add(name) if number is None else number

    def numbers_besides(self, names: Container[str]) -> list[int]:
        """Return the numbers of all names but these, in order; that of `OTHERS` is left out."""
        return [number for name, number in self._number.items() if name not in names and name != OTHERS]

    def _add(self, name: str) -> int:
        if len(self._number) >= MAX_NAMES:
            name = OTHERS
        number = self._number.get(name)
        if number is None:
            number = self._number[name] = len(self._number)
            self._new.append(name)
        return number

    def take_new(self) -> list[str]:
        """Return, once, the names added since the last call."""
        new, self._new = self._new, []
        return new


class Tables:
    """The names of a watcher."""

    __slots__ = ("adapters", "tenants")

    def __init__(self) -> None:
        self.adapters = Names()
        self.tenants = Names()

    def adapter(self, adapter_id: str | None) -> int:
        """Return an adapter's number; None: the base model."""
        return BASE_MODEL if adapter_id is None else self.adapters.number(adapter_id)


@dataclass(slots=True)
class Use:
    """Requests of an adapter or a tenant: running, waiting, longest wait, and output.

    Attributes:
        oldest_ps: how long the earliest arrival among the waiting ones has waited.
        output_tokens: of all of them so far.
    """

    num_running: int = 0
    num_waiting: int = 0
    oldest_ps: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class ResidentAdapter:
    """An adapter on a GPU, or being loaded; `left_ps` is the rest of its load time."""

    adapter: int
    state: int
    rank: int
    left_ps: int


@dataclass(slots=True)
class WorkerSnapshot:
    """One worker.

    Attributes:
        handles: of the sequences in its batch; the next four lists have a value for each.
        num_waiting: sequences that wait for its batch; `oldest_ps`: how long the earliest arrival of them has waited.
        num_host: adapters in host memory.
    """

    name: str
    draining: bool
    handles: list[int]
    adapters: list[int]
    tenants: list[int]
    prompt_tokens: list[int]
    output_tokens: list[int]
    num_waiting: int
    oldest_ps: int
    kv_tokens: int
    pool_tokens: int
    residents: list[ResidentAdapter]
    num_host: int


@dataclass(slots=True)
class ClusterSnapshot:
    """One scheduler; `num_unplaced` requests wait for a worker, `num_held` for a slot of their API key."""

    at_ps: int
    workers: list[WorkerSnapshot]
    num_unplaced: int
    num_held: int
    tenants: dict[int, Use]
    adapters: dict[int, Use]


def snapshot(core: ClusterCore, tables: Tables, at_ps: int) -> ClusterSnapshot:
    """Return the current state, as far as steps are committed.

    Args:
        core: of the scheduler.
        tables: of the watcher; new names are added.
        at_ps: now.
    """
    uses = _Uses(tables, at_ps)
    workers = [_worker(member, uses, at_ps) for member in core.members.values()]
    for sequence in core.unplaced():
        uses.waits(sequence)
    return ClusterSnapshot(at_ps, workers, core.num_unplaced, core.num_held, uses.tenants, uses.adapters)


class _Uses:
    """Counts requests by adapter and by tenant."""

    __slots__ = ("adapters", "at_ps", "tables", "tenants")

    def __init__(self, tables: Tables, at_ps: int) -> None:
        self.tables = tables
        self.at_ps = at_ps
        self.tenants: dict[int, Use] = {}
        self.adapters: dict[int, Use] = {}

    def waits(self, sequence: Sequence) -> int:
        """Count a waiting sequence; return for how long it has waited."""
        waited_ps = max(0, self.at_ps - sequence.arrived_ps)
        adapter, tenant = self.numbers(sequence)
        for use in (_of(self.adapters, adapter), _of(self.tenants, tenant)):
            use.num_waiting += 1
            use.output_tokens += sequence.produced_tokens
            use.oldest_ps = max(use.oldest_ps, waited_ps)
        return waited_ps

    def runs(self, adapter: int, tenant: int, output_tokens: int) -> None:
        """Count a running sequence."""
        for use in (_of(self.adapters, adapter), _of(self.tenants, tenant)):
            use.num_running += 1
            use.output_tokens += output_tokens

    def numbers(self, sequence: Sequence) -> tuple[int, int]:
        """Return the numbers of its adapter and its tenant."""
        tables, adapter = self.tables, sequence.adapter
        return tables.adapter(None if adapter is None else adapter.adapter_id), tables.tenants.number(
            sequence.tenant_id
        )


def _of(uses: dict[int, Use], number: int) -> Use:
    use = uses.get(number)
    if use is None:
        use = uses[number] = Use()
    return use


def _worker(member: Member, uses: _Uses, at_ps: int) -> WorkerSnapshot:
    replica = member.replica
    running = replica.running
    handles: list[int] = []
    adapters: list[int] = []
    tenants: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    num_waiting = oldest_ps = 0
    for sequence in member.sequences.values():
        if sequence.admitted_ps is None:
            num_waiting += 1
            oldest_ps = max(oldest_ps, uses.waits(sequence))
            continue
        adapter, tenant = uses.numbers(sequence)
        output_tokens = _output_tokens(running, sequence)
        uses.runs(adapter, tenant, output_tokens)
        handles.append(sequence.handle)
        adapters.append(adapter)
        tenants.append(tenant)
        prompts.append(sequence.prompt_tokens)
        outputs.append(output_tokens)
    return WorkerSnapshot(
        member.name,
        member.draining,
        handles,
        adapters,
        tenants,
        prompts,
        outputs,
        num_waiting,
        oldest_ps,
        _pool_tokens_in_use(replica, member.pool_tokens),
        member.pool_tokens,
        _residents(replica.adapters, running, uses.tables, at_ps),
        len(replica.adapters.host),
    )


def _pool_tokens_in_use(replica: Replica, pool_tokens: int) -> int:
    """Return how much of the pool is taken; of paged memory whole blocks, each once however many sequences share it."""
    use = replica.memory.block_use(replica.running)
    return replica.kv_tokens if use is None else min(use.used * use.block_size, pool_tokens)


def _output_tokens(running: Running, sequence: Sequence) -> int:
    handle, produced = sequence.handle, sequence.produced_tokens
    if handle in running.prefilling:
        return produced
    if handle in running.held:
        return produced + sequence.held_output_tokens
    return produced + sequence.output_tokens_at(running.decode_step)


def _residents(residency: Residency, running: Running, tables: Tables, at_ps: int) -> list[ResidentAdapter]:
    residents = [
        ResidentAdapter(tables.adapter(adapter.adapter_id), IN_USE if running.uses(key) else ON_GPU, adapter.rank, 0)
        for key, adapter in residency.gpu.items()
    ]
    for load in residency.loading.values():
        adapter = load.adapter
        left_ps = max(0, load.ready_ps - at_ps)
        residents.append(ResidentAdapter(tables.adapter(adapter.adapter_id), LOADING, adapter.rank, left_ps))
    return residents


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
        missing: see `History`.
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
    missing: list[Missing]
    ended: list[EndedRow]
    num_more_ended: int
    events: list[Happened]
    num_more_events: int


class Watcher:
    """Takes frames of a scheduler for one watcher.

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
            list(history.missing.values()),
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
