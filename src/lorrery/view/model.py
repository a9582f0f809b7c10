"""The model that page and terminal show: the cluster as of the newest frame, and the figures of the last minutes.

Frames refer to adapters and tenants by index, in order of appearance, and a new connection starts new indices. So all
state is kept by name, and indices only serve to look up names. All times are device seconds.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lorrery.view.figures import (
    BASE,
    Adapter,
    Counter,
    Ended,
    Gauge,
    Tenant,
    Worker,
    alert_counter,
    alert_gauge,
    percentiles,
)
from lorrery.view.frame import LOADING, EventRow, FaultRow, Frame, Hello, MissingRow, Shard, Totals
from lorrery.view.frame import Worker as WorkerState
from lorrery.vocabulary.objectives import LONGEST_SECONDS

RECENT_SECONDS = 10.0
"""Window of ended requests for the percentiles of TTFT."""
RATE_SECONDS = 2.0
"""Window of the cluster's tokens per second."""
SHARE_SECONDS = 30.0
"""Window of a tenant's share of the tokens and of the requests."""
_MAX_ENDED, _MAX_EVENTS, _MAX_FAILURES = 2_000, 300, 100
_OBJECTIVE_SPACING_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's share of the output tokens, and of the running and waiting requests, over `SHARE_SECONDS`."""

    tokens: float
    demand: float


class Model:
    """Applies frames, and holds the state that notices, tables and series are computed from.

    Attributes:
        at: time of the newest frame.
        started_at: time of the first frame; None before it.
        lost: workers that are gone without having drained, until one of that name is back, another with a KV pool of
            that size has attached, or they are dismissed.
        faults: injected ones that are on.
        failures: the latest adapter loads that failed.
        not_ready_since: since when no worker is ready; None: one is.
        backlog_since: since when more requests wait than run; None: they do not.
        past: counts of the cluster over the minutes that most alerts look at, by name.
        objectives: counts against each objective over a longer time: what it covers, and what has missed it.
        recent: requests that ended within `RECENT_SECONDS` and had a first token.
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
        self.recent: deque[Ended] = deque(maxlen=_MAX_ENDED)
        self.events: deque[EventRow] = deque(maxlen=_MAX_EVENTS)
        self.failures: deque[EventRow] = deque(maxlen=_MAX_FAILURES)
        self.faults: Sequence[FaultRow] = ()
        self.totals = Totals()
        self.unplaced = self.held = 0
        self.unplaced_since: float | None = None
        self.not_ready_since: float | None = None
        self.backlog_since: float | None = None
        self.widest_batch = 0
        self.tokens, self.finished, self.requests = Counter(), Counter(), Counter()
        self.queue, self.backlog = Gauge(), alert_gauge()
        self.past = {name: alert_counter() for name in ("finished", "preempted", "loads", "thrash", "workers_lost")}
        self.objectives: dict[str, tuple[Counter, Counter]] = {}
        self._known_until = float("-inf")  # of an earlier connection: events until then have been told
        self._dismissed: set[tuple[int, str, float]] = set()
        self._by_key: dict[tuple[int, str], Worker] = {}
        self._shares: dict[str, Share] | None = None  # as of the newest frame, once computed

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

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, over `RATE_SECONDS`."""
        return self.tokens.rate(RATE_SECONDS)

    @property
    def ttft(self) -> tuple[float, float] | None:
        """Percentiles 50 and 95 of the TTFT over the requests that ended recently; None: none did."""
        return percentiles(self.recent)

    def begin(self, hello: Hello) -> None:
        """Continue with a new connection, which restarts indices, request numbers and counts."""
        self.hello = hello
        self._adapter_names, self._tenant_names = [], []
        self._known_until = self.at if self.started_at is not None else float("-inf")
        for worker in self.workers:
            worker.requests = frozenset()

    def dismiss_lost(self) -> None:
        """Show the workers that are lost now no longer; one that is lost later is shown again."""
        for worker in self.lost:
            self._dismissed.add((worker.state.shard, worker.name, worker.lost_at or 0.0))
            del self._by_key[worker.state.shard, worker.name]
        self.lost = []

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
        self.at = max(self.at, frame.at)
        if self.started_at is None:
            self.started_at = self.at
        self.shards, self.unplaced, self.held = frame.shards, frame.unplaced, frame.held
        self.faults = frame.faults
        if not frame.unplaced:
            self.unplaced_since = None
        elif self.unplaced_since is None:
            self.unplaced_since = self.at
        self._shares = None
        self._take_workers(frame)
        self._take_names(frame)
        self._take_history(frame)

    def _take_workers(self, frame: Frame) -> None:
        before, known = self.workers, {name for _, name in self._by_key}
        self.workers = []
        for state in frame.workers:
            key = state.shard, state.id
            worker = self._by_key.get(key)
            if worker is None:
                worker = self._by_key[key] = Worker(state.id, state, self.at, self.at, self.at)
            worker.update(self.at, state)
            self.workers.append(worker)
        present = {id(worker) for worker in self.workers}
        for worker in before:
            if id(worker) not in present:
                if worker.state.state == "draining" and not worker.running:  # a regular departure
                    del self._by_key[worker.state.shard, worker.name]
                else:
                    worker.lost_at = self.at
                    self.lost.append(worker)
        self._take_missing(frame.missing)
        self._find_again(known)
        if any(worker.state.state == "ready" for worker in self.workers):
            self.not_ready_since = None
        elif self.not_ready_since is None:
            self.not_ready_since = self.at
        self.widest_batch = max([self.widest_batch, *(len(worker.running) for worker in self.workers)])

    def _take_missing(self, missing: Sequence[MissingRow]) -> None:
        """Add workers that were lost before the watch began, and the time at which the others were."""
        for row in missing:
            if (row.shard, row.id, row.lost_at) in self._dismissed:
                continue
            worker = self._by_key.get((row.shard, row.id))
            if worker is None:
                state = WorkerState(
                    row.id, row.shard, row.gpu, row.tp, "ready", [], 0, 0.0, 0, row.pool, [], 0, 0.0, "idle", 0, 0.0, 0
                )
                worker = self._by_key[row.shard, row.id] = Worker(row.id, state, self.at, self.at, self.at, row.lost_at)
                self.lost.append(worker)
            elif worker.lost_at is not None:
                worker.lost_at = row.lost_at

    def _find_again(self, known: set[str]) -> None:
        """Drop lost workers that are back, at whichever scheduler, or that a new worker replaces."""
        back = {worker.name for worker in self.workers}
        is_first = self.at == self.started_at
        new = [] if is_first else [worker.kind for worker in self.workers if worker.name not in known]
        for worker in list(self.lost):
            if worker.name not in back:
                if worker.kind not in new:
                    continue
                new.remove(worker.kind)
            self.lost.remove(worker)
            if worker.lost_at is not None:  # and not the same one, back at the same scheduler
                del self._by_key[worker.state.shard, worker.name]

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
            adapter.loads.push(self.at, counts.loads)
            adapter.evictions.push(self.at, counts.evictions)
            adapter.thrash.push(self.at, counts.thrash)
        self._take_residents(frame)
        for row in frame.tenants:
            name = self.tenant_name(row.tenant)
            if name not in self.tenants:
                self.tenants[name] = Tenant(name)
                self.tenants[name].ended.push(self.at, 0)
                self.tenants[name].queued.push(self.at, 0)
            tenant = self.tenants[name]
            tenant.running, tenant.waiting, tenant.oldest = row.running, row.waiting, row.oldest
            tenant.tokens.push(self.at, row.output_tokens)
            tenant.refused.push(self.at, row.refused)
        for tenant in self.tenants.values():
            tenant.runnings.push(self.at, tenant.running)
            tenant.waitings.push(self.at, tenant.waiting)

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
        adapter = self.adapters.get(name)
        if adapter is None:
            adapter = self.adapters[name] = Adapter(name)
        return adapter

    def _take_history(self, frame: Frame) -> None:
        for row in frame.ended:
            worker = self.workers[row.worker] if 0 <= row.worker < len(self.workers) else None
            if worker is not None:  # no frame need have shown it in the batch
                joined_at = row.arrived + row.queue + row.adapter_load
                worker.joined_at = max(worker.joined_at, min(self.at, joined_at))
            adapter = self.adapter_name(row.adapter)
            ended = Ended(
                self.at,
                row,
                "" if worker is None else worker.name,
                BASE if adapter is None else adapter,
                self.tenant_name(row.tenant),
                row.queue + row.adapter_load + row.prefill,
            )
            self.ended.append(ended)
            if ended.tenant in self.tenants:
                tenant = self.tenants[ended.tenant]
                tenant.ended.push(self.at, tenant.ended.total + 1)
                tenant.queued.push(self.at, tenant.queued.total + row.queue)
            if row.output_tokens:
                self.recent.append(ended)
        while self.recent and self.recent[0].at <= self.at - RECENT_SECONDS:
            self.recent.popleft()
        events = [event for event in frame.events if event.at > self._known_until]
        self.events.extend(events)
        self.failures.extend([event for event in events if event.kind == "load_failed"])
        self._known_until = float("-inf")
        self.totals = frame.totals
        self.tokens.push(self.at, frame.totals.output_tokens)
        self.finished.push(self.at, frame.totals.finished)
        self.requests.push(self.at, frame.totals.requests)
        self.queue.push(self.at, self.waiting)
        self._take_past(frame)

    def _take_past(self, frame: Frame) -> None:
        """Keep what the alerts look at."""
        self.backlog.push(self.at, self.waiting)
        if self.waiting <= self.running:
            self.backlog_since = None
        elif self.backlog_since is None:
            self.backlog_since = self.at
        thrash = sum(row.thrash for row in frame.adapters)
        for name, counter in self.past.items():
            counter.push(self.at, thrash if name == "thrash" else getattr(frame.totals, name))
        for row in frame.objectives:
            if row.name not in self.objectives:
                self.objectives[row.name] = (
                    Counter(LONGEST_SECONDS, _OBJECTIVE_SPACING_SECONDS),
                    Counter(LONGEST_SECONDS, _OBJECTIVE_SPACING_SECONDS),
                )
            counted, missed = self.objectives[row.name]
            counted.push(self.at, row.counted)
            missed.push(self.at, row.missed)

    def shares(self) -> dict[str, Share]:
        """Return each tenant's shares, by its key."""
        if self._shares is None:
            self._shares = self._computed_shares()
        return self._shares

    def _computed_shares(self) -> dict[str, Share]:
        tokens = {key: tenant.tokens.growth(SHARE_SECONDS) for key, tenant in self.tenants.items()}
        requests = {
            key: tenant.runnings.mean(SHARE_SECONDS) + tenant.waitings.mean(SHARE_SECONDS)
            for key, tenant in self.tenants.items()
        }
        all_tokens, all_requests = sum(tokens.values()) or 1.0, sum(requests.values()) or 1.0
        return {key: Share(tokens[key] / all_tokens, requests[key] / all_requests) for key in tokens}
