"""The state behind the screen: the cluster as of the newest frame, and the history of the last minute.

Frames refer to adapters and tenants by index, in order of appearance, and a new connection starts new indices. So all
state is kept by name, and indices only serve to look up names. All times are device seconds.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lorrery.view.frame import LOADING, EndedRow, EventRow, Frame, Hello, ResidentRow, RunningRow, Shard, Totals
from lorrery.view.frame import Worker as WorkerState
from lorrery.view.top.series import Counter, Gauge

BASE, NO_TENANT = "base model", "(no tenant)"
"""Display names for requests without an adapter and without a tenant."""
LOST_SECONDS = 60.0
"""How long a lost worker is still shown."""
RECENT_SECONDS = 10.0
"""Window of ended requests for the percentiles of TTFT."""
RATE_SECONDS = 2.0
"""Window of tokens and requests per second."""
_MAX_ENDED, _MAX_EVENTS = 2_000, 300


@dataclass(slots=True)
class Adapter:
    """An adapter, or the base model, over all workers.

    Attributes:
        unloaded: whether it is refused to new requests.
    """

    name: str
    unloaded: bool = False
    running: int = 0
    waiting: int = 0
    on_gpus: int = 0
    loading: int = 0
    rank: int = 0
    loads: Counter = field(default_factory=Counter)
    evictions: Counter = field(default_factory=Counter)
    thrash: Counter = field(default_factory=Counter)

    @property
    def is_gone(self) -> bool:
        """Whether it is unloaded and its last request has ended."""
        return self.unloaded and not self.running and not self.waiting


@dataclass(slots=True)
class Tenant:
    """A tenant's current requests, and its totals."""

    name: str
    running: int = 0
    waiting: int = 0
    oldest: float = 0.0
    tokens: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    runnings: Gauge = field(default_factory=Gauge)
    waitings: Gauge = field(default_factory=Gauge)


@dataclass(slots=True)
class Worker:
    """A worker: its part of the newest frame, and its history.

    Attributes:
        joined_at: when a request last joined its batch.
        ran_at: when it last had a batch.
        lost_at: when it was lost; None: it is attached.
    """

    name: str
    state: WorkerState
    joined_at: float
    ran_at: float
    lost_at: float | None = None
    requests: frozenset[int] = frozenset()
    tokens: Counter = field(default_factory=Counter)
    busy: Counter = field(default_factory=Counter)
    preempted: Counter = field(default_factory=Counter)

    @property
    def running(self) -> Sequence[RunningRow]:
        """Its batch; empty if it is lost."""
        return self.state.running if self.lost_at is None else ()

    @property
    def waiting(self) -> int:
        """Length of its queue; 0 if it is lost."""
        return self.state.waiting if self.lost_at is None else 0

    @property
    def resident(self) -> Sequence[ResidentRow]:
        """Adapters on its GPU; empty if it is lost."""
        return self.state.adapters if self.lost_at is None else ()

    @property
    def kv_ratio(self) -> float:
        """Share of its KV pool in use; 0 if it is lost."""
        return self.state.kv / self.state.pool if self.state.pool and self.lost_at is None else 0.0

    def update(self, at: float, state: WorkerState) -> None:
        """Apply its part of a frame."""
        requests = frozenset(row.request for row in state.running)
        if requests - self.requests:
            self.joined_at = at
        if requests:
            self.ran_at = at
        self.state, self.requests, self.lost_at = state, requests, None
        self.tokens.push(at, state.tokens)
        self.busy.push(at, state.busy)
        self.preempted.push(at, state.preempted)


@dataclass(frozen=True, slots=True)
class Ended:
    """An ended request, with names instead of indices."""

    at: float
    row: EndedRow
    worker: str
    adapter: str
    tenant: str

    @property
    def ttft(self) -> float:
        """Time from its arrival at the scheduler to its first token."""
        return self.row.queue + self.row.adapter_load + self.row.prefill


class Model:
    """Applies frames, and holds the state that tables and rules read.

    Attributes:
        at: time of the newest frame.
        started_at: time of the first frame; None before it.
        lost: workers lost within the last minute, that is, gone without having drained.
        ttft: percentiles 50 and 95 over the requests that ended recently; None: none did.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self._adapter_names: list[str] = []
        self._tenant_names: list[str] = []
        self._forget()

    def _forget(self) -> None:
        self.at = 0.0
        self.started_at: float | None = None
        self.workers: list[Worker] = []
        self.lost: list[Worker] = []
        self.shards: Sequence[Shard] = ()
        self.adapters: dict[str | None, Adapter] = {}
        self.tenants: dict[str, Tenant] = {}
        self.ended: deque[Ended] = deque(maxlen=_MAX_ENDED)
        self.events: deque[EventRow] = deque(maxlen=_MAX_EVENTS)
        self.totals = Totals()
        self.unplaced = self.held = 0
        self.unplaced_since: float | None = None
        self.widest_batch = 0
        self.ttft: tuple[float, float] | None = None
        self.tokens, self.finished, self.requests = Counter(), Counter(), Counter()
        self.queue = Gauge()
        self._by_key: dict[tuple[int, str], Worker] = {}

    @property
    def running(self) -> int:
        """Sequences in all batches."""
        return sum(len(worker.running) for worker in self.workers)

    @property
    def waiting(self) -> int:
        """Requests that wait: at workers, for a worker, or for their key's quota."""
        return self.unplaced + self.held + sum(worker.waiting for worker in self.workers)

    @property
    def kv_ratio(self) -> float:
        """Share of all KV pools together that is in use."""
        pool = sum(worker.state.pool for worker in self.workers)
        return sum(worker.state.kv for worker in self.workers) / pool if pool else 0.0

    def begin(self, hello: Hello) -> None:
        """Continue with a new connection, which restarts indices, request numbers and counts."""
        self.hello = hello
        self._adapter_names, self._tenant_names = [], []
        for worker in self.workers:
            worker.requests = frozenset()

    def learn(self, adapters: Iterable[str], tenants: Iterable[str]) -> None:
        """Add the names of frames that are not applied."""
        self._adapter_names += adapters
        self._tenant_names += tenants

    def adapter_name(self, index: int) -> str | None:
        """Return the name of an adapter; None: the base model."""
        if index < 0:
            return None
        return self._adapter_names[index] if index < len(self._adapter_names) else f"adapter {index}"

    def tenant_name(self, index: int) -> str:
        """Return the name of a tenant; empty: requests of none."""
        return self._tenant_names[index] if 0 <= index < len(self._tenant_names) else f"tenant {index}"

    def apply(self, frame: Frame) -> None:
        """Apply a frame."""
        if frame.at < self.at - 1:
            self._forget()  # the scheduler was restarted, and with it the device clock
        self.learn(frame.adapters_new, frame.tenants_new)
        self.at = frame.at
        if self.started_at is None:
            self.started_at = frame.at
        self.shards, self.unplaced, self.held = frame.shards, frame.unplaced, frame.held
        if not frame.unplaced:
            self.unplaced_since = None
        elif self.unplaced_since is None:
            self.unplaced_since = frame.at
        self._take_workers(frame)
        self._take_names(frame)
        self._take_history(frame)

    def _take_workers(self, frame: Frame) -> None:
        before = self.workers
        self.workers = []
        for state in frame.workers:
            key = state.shard, state.id
            worker = self._by_key.get(key)
            if worker is None:
                worker = self._by_key[key] = Worker(state.id, state, frame.at, frame.at)
            worker.update(frame.at, state)
            self.workers.append(worker)
        present = {id(worker) for worker in self.workers}
        for worker in before:
            if id(worker) not in present:
                if worker.state.state == "draining" and not worker.running:  # a regular departure
                    del self._by_key[worker.state.shard, worker.name]
                else:
                    worker.lost_at = frame.at
                    self.lost.append(worker)
        self.lost = [worker for worker in self.lost if worker.lost_at is not None]
        for worker in [one for one in self.lost if frame.at - (one.lost_at or 0.0) >= LOST_SECONDS]:
            self.lost.remove(worker)
            del self._by_key[worker.state.shard, worker.name]
        self.widest_batch = max([self.widest_batch, *(len(worker.running) for worker in self.workers)])

    def _take_names(self, frame: Frame) -> None:
        for adapter in self.adapters.values():
            adapter.running = adapter.waiting = adapter.on_gpus = adapter.loading = 0
            adapter.unloaded = False
        for tenant in self.tenants.values():
            tenant.running = tenant.waiting = 0
            tenant.oldest = 0.0
        for counts in frame.adapters:
            adapter = self._adapter(counts.adapter)
            adapter.running, adapter.waiting, adapter.unloaded = counts.running, counts.waiting, counts.unloaded
            adapter.loads.push(frame.at, counts.loads)
            adapter.evictions.push(frame.at, counts.evictions)
            adapter.thrash.push(frame.at, counts.thrash)
        self._take_residents(frame)
        for row in frame.tenants:
            name = self.tenant_name(row.tenant)
            tenant = self.tenants.setdefault(name, Tenant(name))
            tenant.running, tenant.waiting, tenant.oldest = row.running, row.waiting, row.oldest
            tenant.tokens.push(frame.at, row.output_tokens)
            tenant.refused.push(frame.at, row.refused)
        for tenant in self.tenants.values():
            tenant.runnings.push(frame.at, tenant.running)
            tenant.waitings.push(frame.at, tenant.waiting)

    def _take_residents(self, frame: Frame) -> None:
        """Count the GPUs that each adapter is on, or being loaded to; a GPU may have two versions of it."""
        states: dict[int, int] = {}
        for worker in frame.workers:
            loading = {row.adapter for row in worker.adapters if row.state == LOADING}
            for index in loading:
                self._adapter(index).loading += 1
            for index in {row.adapter for row in worker.adapters} - loading:
                self._adapter(index).on_gpus += 1
            for row in worker.adapters:  # prefer the rank of a version in use over that of an unused one
                if row.state >= states.get(row.adapter, 0):
                    states[row.adapter] = row.state
                    self._adapter(row.adapter).rank = row.rank

    def _adapter(self, index: int) -> Adapter:
        name = self.adapter_name(index)
        return self.adapters.setdefault(name, Adapter(BASE if name is None else name))

    def _take_history(self, frame: Frame) -> None:
        for row in frame.ended:
            worker = frame.workers[row.worker].id if 0 <= row.worker < len(frame.workers) else ""
            adapter = self.adapter_name(row.adapter)
            self.ended.append(
                Ended(frame.at, row, worker, BASE if adapter is None else adapter, self.tenant_name(row.tenant))
            )
        self.events.extend(frame.events)
        self.totals = frame.totals
        self.tokens.push(frame.at, frame.totals.output_tokens)
        self.finished.push(frame.at, frame.totals.finished)
        self.requests.push(frame.at, frame.totals.requests)
        self.queue.push(frame.at, self.waiting)
        self.ttft = percentiles(self.recent())

    def recent(self) -> list[Ended]:
        """Return the requests that ended within `RECENT_SECONDS` and had a first token, newest first."""
        found = []
        for one in reversed(self.ended):
            if one.at <= self.at - RECENT_SECONDS:
                break
            if one.row.output_tokens > 0:
                found.append(one)
        return found


def percentiles(ended: Iterable[Ended]) -> tuple[float, float] | None:
    """Return the percentiles 50 and 95 of their TTFT; None: there are none."""
    times = sorted(one.ttft for one in ended)
    return (times[len(times) // 2], times[len(times) * 95 // 100]) if times else None
