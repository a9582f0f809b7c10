"""One scheduler, live: its workers and routers, and the parts that carry out what the core decides.

Requests are handled in `requests.py`, adapters in `adapter_changes.py`, one worker in `workers.py`; the decisions are
those of `scheduler.core.cluster`.
"""

import asyncio
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from lorrery.scheduler import wire_routers, wire_workers
from lorrery.scheduler.adapter_changes import AdapterChanges
from lorrery.scheduler.adapters import LoadedAdapters
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import Joined
from lorrery.scheduler.core.facts import Facts, FaultBegan
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.policies import batch_limits, batching_name
from lorrery.scheduler.core.sequence import Sequence as CoreSequence
from lorrery.scheduler.facts import FaultsSet
from lorrery.scheduler.faults import ClusterFaults, told_to
from lorrery.scheduler.liveness import Loss, Watch
from lorrery.scheduler.messages import Load, WorkerHello
from lorrery.scheduler.replicas import ReplicaFactory, cluster_rules
from lorrery.scheduler.requests import Requests
from lorrery.scheduler.routers import LiveRequest, RouterLink
from lorrery.scheduler.subscribers.engine_counts import EngineTallies, EngineTally
from lorrery.scheduler.subscribers.gauges import Gauges
from lorrery.scheduler.subscribers.journal import Journal
from lorrery.scheduler.subscribers.kv_events import KvEvents
from lorrery.scheduler.subscribers.metrics import SchedulerMetrics
from lorrery.scheduler.subscribers.tracing import RequestTraces
from lorrery.scheduler.wire_frames import Feed
from lorrery.scheduler.workers import Dispatcher
from lorrery.service.clocks import DeviceClock, UptimeClock
from lorrery.service.faults.kinds import Fault
from lorrery.service.names import quoted
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import Slices
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.output_groups import OutputGroups
from lorrery.service.telemetry.tracing import Tracer
from lorrery.vocabulary.adapters import AdapterFigures
from lorrery.vocabulary.units import PS_PER_SECOND

log = get_logger("scheduler.cluster")


class Cluster:
    """The state of one scheduler.

    Args:
        settings: of the cluster.
        registry: where its metrics are shown.
        tracer: receives the spans of its requests; None: tracing is off.
    """

    def __init__(self, settings: Settings, registry: CollectorRegistry, tracer: Tracer | None = None) -> None:
        self.settings = settings
        self.clock = DeviceClock(settings.time_scale)
        self.uptime = UptimeClock()
        self.workers: dict[str, Dispatcher] = {}
        self.routers: dict[RouterLink, None] = {}  # in order of connecting
        self.slices = Slices()
        self._closing = False
        self._balance_soon: asyncio.Handle | None = None
        self._factory = ReplicaFactory(settings)
        loaded = LoadedAdapters(settings)
        path = settings.scheduler.journal
        self.core = ClusterCore(
            self._factory.placement(),
            cluster_rules(settings),
            [
                self._factory.adapter(name, rank, number=number)
                for number, (name, rank) in enumerate(settings.adapters.expand(), start=1)
            ],
            notes_figures=path is not None,
        )
        self.facts = facts = Facts()
        lives: dict[int, LiveRequest] = {}
        self.metrics = SchedulerMetrics(registry, lives, settings.metrics)
        self.metrics.adapters.foresee(self.core.adapters)
        self.faults = ClusterFaults(settings, self.clock, self.metrics.faults, self.workers, self._lose)
        self.feed = Feed(self.core, facts, self.workers, self.clock, self.faults.active)
        self.journal = None if path is None else Journal(path, settings, lives)
        own = settings.scheduler
        self.kv_events = KvEvents(own.prefix_cache.kind, 8 * own.max_pending_router_tokens)
        self.traces = RequestTraces(tracer, self.clock, lives)
        shown = settings.metrics
        self._engines = EngineTallies(self._engine_tally) if shown.vllm or shown.sglang else None
        if self.journal is not None:
            facts.subscribe(self.journal)
        facts.subscribe(self.traces)
        facts.subscribe(self.metrics)
        if self._engines is not None:
            facts.subscribe(self._engines)
        self.requests = Requests(
            self.core,
            facts,
            lives,
            self.workers,
            self._factory,
            self.metrics,
            clock=self.clock,
            uptime=self.uptime,
            slices=self.slices,
            log_placement=own.log_placement,
        )
        self.adapters = AdapterChanges(loaded, self.core, facts, self._factory, self.routers, self.workers, self.clock)
        self._groups = OutputGroups()
        Gauges(self.metrics, self)

    # --- read by the gauges, in another thread ------------------------------------------------------------------------

    @property
    def cores(self) -> tuple[ClusterCore, ...]:
        """Its core."""
        return (self.core,)

    @property
    def members(self) -> list[Member]:
        """Its attached workers, as the core sees them."""
        return [worker.member for worker in list(self.workers.values())]

    @property
    def open_sequences(self) -> list[CoreSequence]:
        """Sequences of the requests that have not ended."""
        return [live.sequence for live in list(self.requests.lives.values())]

    @property
    def num_routers(self) -> int:
        """Connected routers."""
        return len(self.routers)

    @property
    def fairness(self) -> float:
        """Jain's index of the service that tenants got."""
        return self.metrics.served.jain_index(self.clock.now_ps() / PS_PER_SECOND)

    # --- read by routers, and by workers that look for a scheduler ----------------------------------------------------

    @property
    def load(self) -> Load:
        """The scheduler's present load."""
        num_workers = sum(not worker.member.draining for worker in self.workers.values())
        return Load(num_workers, len(self.requests.lives), len(self.routers))

    @property
    def first_to_leave(self) -> str:
        """The least loaded worker, of equals the last to attach; empty: there is none, or one is draining.

        A draining worker is counted neither here nor, yet, at its destination: a second departure might be too many.
        """
        workers = list(reversed(self.workers.values()))
        if not workers or any(worker.member.draining for worker in workers):
            return ""
        return min(workers, key=lambda worker: worker.member.candidate.load).worker_id

    def adapter_figures(self) -> dict[str, AdapterFigures]:
        """Return the figures of adapters until now."""
        logs = [worker.replica.adapters.log for worker in self.workers.values()]
        return self.metrics.tally.read(logs, self.clock.now_ps())

    # --- workers ----------------------------------------------------------------------------------------------------

    def attach(
        self, hello: WorkerHello, instance_id: str = "", kv_source: wire_workers.KvEventSource | None = None
    ) -> Dispatcher:
        """Attach a worker, and place the sequences that wait for one.

        Args:
            hello: its announcement.
            instance_id: of its process; empty: unknown.
            kv_source: where it publishes KV events; None: nowhere.

        Raises:
            ValueError: it announces another base model, or an id that is attached.
            NoKvEvents: it publishes KV events, but its prefix cache has no blocks.
            InjectedFault: a fault keeps it away.
        """
        self.faults.check_attach(hello.worker_id, self.clock.now_ps())
        if hello.model != self.settings.model:
            raise ValueError(
                f"worker {hello.worker_id} serves {quoted(hello.model)}; this cluster serves {self.settings.model}"
            )
        if hello.worker_id in self.workers:
            raise ValueError(f"worker {hello.worker_id} is attached already")
        if kv_source is not None:
            self.kv_events.check(f"worker {hello.worker_id} publishes KV events (worker.kv_events)")
        settings = self._factory.replica_settings(hello)
        at_ps = self.clock.now_ps()
        self.faults.begin(at_ps)
        load_rules = self.faults.load_rules(hello.worker_id)
        member = Member(
            hello.worker_id, self._factory.replica(settings, load_rules), settings.max_total_token_num, hello.pace
        )
        self.facts.publish((Joined(member, hello),), at_ps, member)
        events = self.core.attach(member, at_ps)
        watch = Watch(self.settings.scheduler.worker_timeout_seconds, self.uptime.now())
        kv_events = self.kv_events.attach(hello.worker_id, member.replica.prefix_cache, kv_source)
        engine = None if self._engines is None else self._engines.of(member)
        worker = self.workers[hello.worker_id] = Dispatcher(hello, member, self, watch, instance_id, kv_events, engine)
        log.info(
            "worker_attached",
            worker_id=hello.worker_id,
            gpu=hello.gpu,
            policy=settings.policy,
            batching=batching_name(settings),
            max_total_token_num=settings.max_total_token_num,
            batch_max_tokens=batch_limits(settings).max_prompt_tokens,
        )
        for rules, from_ps in self.faults.of_worker(hello.worker_id):
            worker.let_go_wrong(rules, add=True, from_ps=from_ps)
        self.requests.place(events, at_ps)
        self.look_for_moves()
        return worker

    def _engine_tally(self, member: Member) -> EngineTally:
        """Return the tally of what a worker shows under other engines' names."""
        replica, known = member.replica, self.core.adapters.values()
        options, max_loras = replica.adapters.options, replica.batching.limits.max_sequences
        if options.max_loras is not None:
            max_loras = options.max_loras
        elif options.max_slots is not None:
            max_loras = min(max_loras, options.max_slots // max([adapter.slots for adapter in known], default=1))
        lives = self.requests.lives
        return EngineTally(
            replica,
            member.pool_tokens,
            self.settings.scheduler.block_size,
            max(1, max_loras),
            self._groups,
            lambda handle: lives[handle].group,
        )

    def set_faults(self, rules: Sequence[str], *, add: bool) -> None:
        """Apply an operator's faults from now on, in place of those of earlier calls unless they `add`.

        Raises:
            InvalidRequest: see `ClusterFaults.take`.
        """
        from_ps = max([self.clock.now_ps(), *(worker.boundary_ps + 1 for worker in self.workers.values())])
        taken = self.faults.take(rules, from_ps, add=add)
        texts = [fault.text for fault in taken]
        self.facts.publish((FaultsSet(texts, from_ps, add), *map(FaultBegan, texts)), self.clock.now_ps())
        for worker in self.workers.values():
            worker.let_go_wrong(told_to(worker.worker_id, taken), add=add)

    def _lose(self, worker_id: str, fault: Fault) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None:
            self.faults.met(fault)
            worker.give_up(Loss.FAULT, f"injected fault: {fault.text}")

    def drain_worker(self, worker: Dispatcher) -> None:
        """Give a worker no new sequences; its waiting ones go elsewhere, its running ones stay."""
        log.info("worker_draining", worker_id=worker.worker_id, num_running=worker.replica.num_running)
        worker.settle()
        at_ps = self.clock.now_ps()
        gave_back, events = self.core.drain(worker.member, at_ps)
        worker.drained(gave_back, at_ps)
        self.requests.place(events, at_ps)
        self.look_for_moves()

    def given_up(self, worker: Dispatcher, loss: Loss, text: str, error: Exception | None) -> None:
        """Log and count that a worker's stream is to end."""
        self.metrics.workers_given_up.labels(loss).inc()
        self.faults.given_up(worker.worker_id, loss, self.clock.now_ps())
        say = log.warning if error is None else log.error
        say("worker_given_up", worker_id=worker.worker_id, reason=text, exc_info=error)

    def detach(self, worker: Dispatcher) -> None:
        """Remove a worker whose stream has ended or will end, and requeue its sequences; repeated calls do nothing."""
        worker.stop()
        if self.workers.get(worker.worker_id) is not worker:
            return
        del self.workers[worker.worker_id]
        self.kv_events.detach(worker.worker_id)
        at_ps = self.clock.now_ps()
        gave_back, events = self.core.lose(worker.member, at_ps, worker.boundary_ps)
        worker.lost(gave_back, at_ps)
        num_requeued = len(gave_back.sequences)
        left = worker.member.draining or self._closing
        if not left:
            self.metrics.workers_lost.inc()
        log.info("worker_left" if left else "worker_lost", worker_id=worker.worker_id, num_requeued=num_requeued)
        self.requests.place(events, at_ps)
        self.look_for_moves()

    def expect_no_worker(self) -> None:
        """End all waits for a worker, until one attaches."""
        log.info("no_worker_expected", num_unplaced=self.core.num_unplaced)
        self.requests.expect_no_worker()

    # --- balance ----------------------------------------------------------------------------------------------------

    def look_for_moves(self) -> None:
        """Balance waiting requests once all messages that can be read have been read."""
        if self._balance_soon is None and self.core.may_move:
            self._balance_soon = asyncio.get_running_loop().call_soon(self._balance)

    def _balance(self) -> None:
        self._balance_soon = None
        at_ps = self.clock.now_ps()
        for move in self.core.balance(at_ps):
            self.workers[move.donor.name].recalled(move.sequence.handle, move.taker.name, at_ps)

    # --- routers ----------------------------------------------------------------------------------------------------

    def connect(self, router_id: str) -> RouterLink:
        """Connect a router."""
        earlier = self.requests.of([link for link in self.routers if link.router_id == router_id])
        router = RouterLink(router_id, self.clock, self.settings.scheduler.max_pending_router_tokens, earlier)
        self.routers[router] = None
        log.info("router_connected", router_id=router_id, num_adapters=len(self.core.adapters))
        return router

    def disconnect(self, router: RouterLink) -> None:
        """Cancel the requests of a router whose stream has ended."""
        self.routers.pop(router, None)
        log.info("router_disconnected", router_id=router.router_id, num_cancelled=len(router.owned))
        self.requests.orphan(router)

    def begin_drain(self) -> None:
        """Refuse new requests and tell the routers."""
        self.core.draining = True
        for router in self.routers:
            router.send(wire_routers.draining())
        self.requests.tell_if_empty()

    def begin_close(self) -> None:
        """Make the spans of unfinished requests, and log workers as left, since it ends their streams.

        A worker whose stream ends earlier is lost even while the scheduler drains: its requests are recomputed.
        """
        self._closing = True
        self.traces.close(self.clock.now_ps())

    # --- the journal ------------------------------------------------------------------------------------------------

    async def keep_journal(self) -> None:
        """Keep the journal's file up to date, until cancelled or until it fails; without a journal does nothing."""
        if self.journal is not None:
            await self.journal.keep_flushed(self._gather_steps)

    def close_journal(self) -> None:
        """Write what is missing in the journal's file; it is then complete."""
        if self.journal is not None:
            self._gather_steps()
            self.journal.close()

    def _gather_steps(self) -> None:
        for worker in self.workers.values():
            if self.journal is not None and worker.steps_are_settled:
                self.journal.flush_steps(worker.member)
