"""The live driver of the core's cluster: it stamps what comes in, and carries out what the core decides.

Who may come in, where a request goes, what is queued again and when a wait is over is decided in
`scheduler.core.cluster`; here are the clock, the streams, the journal, the log and the metrics.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator

from prometheus_client import CollectorRegistry

from lorrery.chassis.awake import AwakeClock
from lorrery.chassis.clock import DeviceClock
from lorrery.chassis.log import get_logger
from lorrery.chassis.names import quoted
from lorrery.chassis.recent import Recent
from lorrery.chassis.slices import Slices
from lorrery.scheduler import wire
from lorrery.scheduler.adapters import LoadedAdapters
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_events import ClusterEvent, Placed, Refused, Withdrawn
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Recalled
from lorrery.scheduler.core.policies import batch_limits, batching_name
from lorrery.scheduler.core.refusals import Refusal, RefusalReason, withheld
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.fairness import ServedByTenant
from lorrery.scheduler.journal import Journal
from lorrery.scheduler.live_request import Counted, LiveRequest
from lorrery.scheduler.messages import Submit, WorkerHello
from lorrery.scheduler.metrics import SchedulerMetrics
from lorrery.scheduler.replicas import ReplicaFactory, cluster_rules
from lorrery.scheduler.routers import RouterLink
from lorrery.scheduler.watch import Loss, Watch
from lorrery.scheduler.workers import Dispatcher
from lorrery.settings import Settings
from lorrery.vocabulary import u32
from lorrery.vocabulary.adapter_log import AdapterChange
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

MAX_REMEMBERED = 10_000
"""Errors that were logged, and requests of routers that went: what others' words name is not remembered for ever."""

AFTER_STOP_SECONDS = 1.0
"""How long a scheduler that was stopped runs before it lets a wait for a worker end."""

MAX_LOGGED_CHANGES = 16
"""Changes to adapters that come at once and stand in the log, a line each."""

log = get_logger("scheduler.cluster")


class Cluster:
    """The state of one scheduler."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self.settings = settings
        self.clock = DeviceClock(settings.time_scale)
        self.awake = AwakeClock()
        self.lives: dict[int, LiveRequest] = {}
        self.served = ServedByTenant()
        self.workers: dict[str, Dispatcher] = {}
        self.routers: set[RouterLink] = set()
        self.faults_from_ps = 0
        self.empty = asyncio.Event()
        self._num_handles = 0
        self.slices = Slices()
        self._release_soon: asyncio.Handle | None = None
        self._balance_soon: asyncio.Handle | None = None
        self._wait_timer: asyncio.TimerHandle | None = None
        self._waits_until_ps: int | None = None
        self._logged_errors: Recent[str, bool] = Recent(MAX_REMEMBERED)
        self._orphans: Recent[tuple[str, str], Counted] = Recent(MAX_REMEMBERED)
        self._factory = ReplicaFactory(settings)
        self.adapters = LoadedAdapters(settings)
        path = settings.scheduler.journal
        self.core = ClusterCore(
            self._factory.placement(),
            cluster_rules(settings),
            [self._factory.adapter(name, rank) for name, rank in settings.adapters.expand()],
            notes_figures=path is not None,
        )
        self.metrics = SchedulerMetrics(
            registry,
            workers=lambda: list(self.workers.values()),
            num_unplaced=lambda: self.core.num_unplaced,
            num_held=lambda: self.core.num_held,
            fairness=lambda: self.served.jain_index(self.clock.now_ps() / PS_PER_SECOND),
            num_live=lambda: len(self.lives),
            num_routers=lambda: len(self.routers),
        )
        self.journal = None if path is None else Journal(path, settings)
        self._carry_out_changes(self.adapters.log.changes)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit, router: RouterLink) -> None:
        """Take in a request, or refuse it on the spot."""
        at_ps = self.clock.now_ps()
        self._num_handles += 1
        sequence = Sequence(
            handle=self._num_handles,
            prompt_tokens=len(submit.prompt_token_ids_u32) // 4,
            max_new_tokens=submit.max_new_tokens,
            arrived_ps=at_ps,
            tenant_id=submit.tenant_id,
            prompt_token_ids=u32.unpack(submit.prompt_token_ids_u32),
            output_token_ids=submit.produced,
            produced_tokens=len(submit.produced),
        )
        pinned = None
        if submit.resumed and submit.adapter_version and submit.adapter_rank:
            pinned = self._factory.adapter(submit.adapter_id, submit.adapter_rank, submit.adapter_version)
        events = self.core.submit(
            sequence,
            at_ps,
            adapter_id=submit.adapter_id,
            resumed=submit.resumed,
            pinned=pinned,
            quota=submit.quota,
        )
        for event in events:
            if isinstance(event, Refused):
                if self.journal is not None:
                    self.journal.refused(submit.request_id, at_ps, event.refusal.reason)
                self._tell_refused(event, submit.request_id, router, submit.handle)
                return
        if self.journal is not None:
            sampling = wire.sampling_record(submit.sampling)
            self.journal.request(sequence, submit.request_id, sampling, resumed=submit.resumed)
        self.lives[sequence.handle] = LiveRequest(
            sequence=sequence,
            router=router,
            router_handle=submit.handle,
            request_id=submit.request_id,
            prompt_token_ids_u32=submit.prompt_token_ids_u32,
            sampling=submit.sampling,
            token_ids=submit.produced,
            counted=self._counted(submit, router),
        )
        adapter = sequence.adapter
        if adapter is not None and adapter.version != submit.adapter_version:
            router.send(wire.adapter_pinned(submit.handle, adapter))
        self.empty.clear()
        router.owned[submit.handle] = sequence.handle
        log.debug("request_arrived", request_id=submit.request_id, handle=sequence.handle, resumed=submit.resumed)
        self._carry_out(events, at_ps)

    def _counted(self, submit: Submit, router: RouterLink) -> Counted:
        """Return what the metrics have of a request from a stream that broke."""
        orphaned = self._orphans.pop((router.router_id, submit.request_id)) if submit.resumed else None
        return Counted.FIRST_TOKEN if submit.produced else orphaned or Counted.NOTHING

    def cancel(self, router: RouterLink, router_handle: int) -> None:
        """Withdraw a request; unknown handles are ignored, since it may just have ended."""
        handle = router.owned.get(router_handle)
        if handle is not None:
            at_ps = self.clock.now_ps()
            self._carry_out(self.core.cancel(handle, at_ps), at_ps)

    def cancel_all(self, router: RouterLink, router_handles: Iterable[int]) -> None:
        """Withdraw many, in slices."""

        def cancel_each() -> Iterator[None]:
            for router_handle in router_handles:
                self.cancel(router, router_handle)
                yield

        self.slices.do(cancel_each())

    def forget(self, live: LiveRequest) -> None:
        """Drop a request that has ended."""
        if self.lives.pop(live.sequence.handle, None) is not None:
            self._end_use(live)
        live.router.owned.pop(live.router_handle, None)
        if not self.lives:
            self.empty.set()

    def _end_use(self, live: LiveRequest) -> None:
        """Count a request against its key no longer."""
        sequence, at_ps = live.sequence, self.clock.now_ps()
        if sequence.first_admitted_ps is not None:
            tokens = sequence.prompt_tokens + len(live.token_ids)
            self.served.add(sequence.tenant_id, tokens, at_ps / PS_PER_SECOND)
        may_release = self.core.ended(sequence, len(live.token_ids), at_ps)
        if may_release and self._release_soon is None:
            # Not at once: the worker whose step has ended it is about to get its next plan.
            self._release_soon = asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        """Place what its key has held."""
        self._release_soon = None
        at_ps = self.clock.now_ps()
        self._carry_out(self.core.release(at_ps), at_ps)
        self.slices.do(self._place_rest())

    def cancelled(self, lives: Collection[LiveRequest]) -> None:
        """Count and drop requests that have ended by being cancelled, in slices."""

        def forget_each() -> Iterator[None]:
            for live in lives:
                self.metrics.cancelled(orphaned=live.orphaned)
                self.forget(live)
                yield

        self.slices.do(forget_each())

    # --- what the core decides --------------------------------------------------------------------------------------

    def _carry_out(self, events: Iterable[ClusterEvent], at_ps: int) -> None:
        for event in events:
            live = self.lives[event.sequence.handle]
            if isinstance(event, Placed):
                if self.settings.scheduler.log_placement:
                    log.info("placed", request_id=live.request_id, worker_id=event.member.name, why=event.why)
                self.workers[event.member.name].placed(event, at_ps)
            elif isinstance(event, Refused):
                if self.journal is not None:
                    self.journal.refused(live.request_id, at_ps, event.refusal.reason, event.sequence.handle)
                self._tell_refused(event, live.request_id, live.router, live.router_handle)
                self.forget(live)
            elif isinstance(event, Withdrawn):
                # The router is told at once what has been consumed: a stream that it ends by itself needs to say so.
                worker_id = event.member.name if event.sequence.first_admitted_ps is not None else ""
                num_tokens = len(live.token_ids)
                live.router.finished(
                    wire.finished(live.router_handle, event.sequence, FinishReason.ABORTED, num_tokens, worker_id)
                )
                self.workers[event.member.name].withdrawn(event.sequence.handle, at_ps)
            else:
                if self.journal is not None:
                    self.journal.cancelled_unplaced(event.sequence.handle, at_ps)
                self.cancelled([live])
        self._watch_waits()

    def _place_rest(self) -> Iterator[None]:
        """Place what more there is to place again."""
        while self.core.is_placing:
            at_ps = self.clock.now_ps()
            self._carry_out(self.core.place_again(at_ps), at_ps)
            yield

    def look_for_moves(self) -> None:
        """Balance what waits once everything is known that is there to be read."""
        if self._balance_soon is None and self.core.may_move:
            self._balance_soon = asyncio.get_running_loop().call_soon(self._balance)

    def _balance(self) -> None:
        self._balance_soon = None
        at_ps = self.clock.now_ps()
        for move in self.core.balance(at_ps):
            self.workers[move.donor.name].recalled(move.sequence.handle, move.taker.name, at_ps)

    def take_recalled(self, recalled: Iterable[Recalled], donor: Member) -> None:
        """Give requests that have left their worker for another to that, all at one time: they can join together."""
        at_ps = self.clock.now_ps()
        events = [event for one in recalled for event in self.core.take_recalled(one, donor, at_ps)]
        self.metrics.moved.inc(sum(isinstance(event, Placed) for event in events))
        self._carry_out(events, at_ps)

    def _tell_refused(self, event: Refused, request_id: str, router: RouterLink, router_handle: int) -> None:
        if event.error is not None:
            self.log_error(event.refusal.message, event.error)
        self.refuse(router, router_handle, request_id, event.refusal)

    def refuse(self, router: RouterLink, router_handle: int, request_id: str, refusal: Refusal) -> None:
        """Tell a router that a request ends without (further) tokens."""
        failed = refusal.reason in (RefusalReason.INTERNAL, RefusalReason.WORKERS_LOST)
        self.metrics.requests.labels("failed" if failed else "refused").inc()
        log.info("request_refused", request_id=request_id, reason=refusal.message)
        router.refused(router_handle, withheld(refusal))

    def log_error(self, message: str, error: Exception) -> None:
        """Log what a policy raised, with its traceback; the same once only, for it may do so for every request."""
        if message not in self._logged_errors:
            self._logged_errors.put(message, True)
            log.error("policy_raised", reason=message, exc_info=error)

    def _watch_waits(self) -> None:
        """Look again when the first wait for a worker is over."""
        until_ps = self.core.until_ps
        if until_ps == self._waits_until_ps:
            return
        if self._wait_timer is not None:
            self._wait_timer.cancel()
        self._waits_until_ps = until_ps
        if until_ps is not None:
            seconds = (until_ps - self.clock.now_ps()) / PS_PER_SECOND * self.clock.time_scale
            self._wait_timer = asyncio.get_running_loop().call_later(seconds, self._end_waits, until_ps)

    def _end_waits(self, until_ps: int) -> None:
        missing = AFTER_STOP_SECONDS - self.awake.steady_seconds()
        if missing > 0:  # a worker's hello may wait in a socket
            self._wait_timer = asyncio.get_running_loop().call_later(missing, self._end_waits, until_ps)
            return
        self._waits_until_ps = None
        at_ps = max(until_ps, self.clock.now_ps())  # a timer may fire a little early
        self._carry_out(self.core.expire(at_ps), at_ps)

    # --- workers ----------------------------------------------------------------------------------------------------

    def attach(self, hello: WorkerHello, instance_id: str = "") -> Dispatcher:
        """Take in a worker and give it what waits for one.

        Args:
            hello: how it announces itself.
            instance_id: of its process; empty: not said.

        Raises:
            ValueError: it announces another base model, or an id that is attached.
        """
        if hello.model != self.settings.model:
            raise ValueError(
                f"worker {hello.worker_id} serves {quoted(hello.model)}; this cluster serves {self.settings.model}"
            )
        if hello.worker_id in self.workers:
            raise ValueError(f"worker {hello.worker_id} is attached already")
        settings = self._factory.replica_settings(hello)
        at_ps = self.clock.now_ps()
        self.faults_from_ps = self._factory.begin_faults(at_ps)
        journal = None if self.journal is None else self.journal.attached(hello, at_ps)
        member = Member(hello.worker_id, self._factory.replica(settings), settings.max_total_token_num)
        events = self.core.attach(member, at_ps)
        watch = Watch(self.settings.scheduler.worker_timeout_seconds, self.awake.now())
        worker = self.workers[hello.worker_id] = Dispatcher(hello, member, self, watch, instance_id, journal)
        log.info(
            "worker_attached",
            worker_id=hello.worker_id,
            gpu=hello.gpu,
            policy=settings.policy,
            batching=batching_name(settings),
            max_total_token_num=settings.max_total_token_num,
            batch_max_tokens=batch_limits(settings).max_prompt_tokens,
        )
        self._carry_out(events, at_ps)
        self.slices.do(self._place_rest())
        self.look_for_moves()
        return worker

    def drain_worker(self, worker: Dispatcher) -> None:
        """Give a worker nothing new; what waits in its queue goes elsewhere, what runs stays."""
        log.info("worker_draining", worker_id=worker.worker_id, num_running=worker.replica.num_running)
        at_ps = self.clock.now_ps()
        gave_back, events = self.core.drain(worker.member, at_ps)
        worker.drained(gave_back, at_ps)
        self._carry_out(events, at_ps)
        self.slices.do(self._place_rest())
        self.look_for_moves()

    def given_up(self, worker: Dispatcher, loss: Loss, text: str, error: Exception | None) -> None:
        """Log and count that a worker's stream is to end."""
        self.metrics.workers_given_up.labels(loss).inc()
        say = log.warning if error is None else log.error
        say("worker_given_up", worker_id=worker.worker_id, reason=text, exc_info=error)

    def detach(self, worker: Dispatcher) -> None:
        """Forget a worker whose stream has ended or is to end, and queue again what it had; once is enough."""
        worker.stop()
        if self.workers.get(worker.worker_id) is not worker:
            return
        del self.workers[worker.worker_id]
        at_ps = self.clock.now_ps()
        gave_back, events = self.core.lose(worker.member, at_ps, worker.boundary_ps)
        worker.lost(gave_back, at_ps)
        num_requeued = len(gave_back.sequences)
        self.metrics.requeued.inc(num_requeued)
        if not worker.draining:
            self.metrics.workers_lost.inc()
        log.info(
            "worker_left" if worker.draining else "worker_lost", worker_id=worker.worker_id, num_requeued=num_requeued
        )
        self._carry_out(events, at_ps)
        self.slices.do(self._place_rest())
        self.look_for_moves()

    # --- adapters ---------------------------------------------------------------------------------------------------

    async def load_adapter(self, adapter_id: str, rank: int) -> None:
        """Decide to load an adapter; all routers hear of it.

        Raises:
            RequestError: see `LoadedAdapters.load`.
        """
        await self._changed(self.adapters.load(adapter_id, rank))

    async def unload_adapter(self, adapter_id: str) -> bool:
        """Decide to unload an adapter; return whether it was known."""
        news = self.adapters.unload(adapter_id)
        await self._changed(news)
        return bool(news)

    async def learn_changes(
        self, changes: Iterable[AdapterChange], forgotten: int | None = None, told_by: RouterLink | None = None
    ) -> None:
        """Take over what was decided elsewhere; see `LoadedAdapters.merge`."""
        news = self.adapters.merge(changes, forgotten)
        if forgotten is None:
            await self._changed(news, told_by)
        elif news:
            adapters = self.adapters.log
            await self._changed(news, told_by, wire.write_changes(adapters.changes, adapters.forgotten))

    async def _changed(
        self,
        news: list[AdapterChange],
        told_by: RouterLink | None = None,
        message: wire.AdapterChanges | None = None,
    ) -> None:
        self._carry_out_changes(news)
        if news:
            tell = wire.adapter_changes(wire.write_changes(news) if message is None else message)
            for router in self.routers:
                if router is not told_by:
                    router.send(tell)
        await self.adapters.save()

    def _carry_out_changes(self, changes: Iterable[AdapterChange]) -> None:
        at_ps = self.clock.now_ps()
        log_change = log.info
        for number, (version, adapter_id, rank) in enumerate(changes):
            if number == MAX_LOGGED_CHANGES:
                log.info("adapters_changed", and_more="at the level debug")
                log_change = log.debug
            if rank:
                self.core.load_adapter(self._factory.adapter(adapter_id, rank, version))
            else:
                self.core.unload_adapter(adapter_id)
            if self.journal is not None:
                self.journal.adapter(adapter_id, rank, version, at_ps)
            log_change(
                "adapter_loaded" if rank else "adapter_unloaded", adapter_id=adapter_id, rank=rank, version=version
            )

    # --- routers ----------------------------------------------------------------------------------------------------

    def connect(self, router_id: str) -> RouterLink:
        """Take in a router."""
        router = RouterLink(router_id, self.clock, self.settings.scheduler.max_pending_router_tokens)
        self.routers.add(router)
        log.info("router_connected", router_id=router_id, num_adapters=len(self.core.adapters))
        return router

    def disconnect(self, router: RouterLink) -> None:
        """Cancel what a router owned whose stream has ended."""
        self.routers.discard(router)
        log.info("router_disconnected", router_id=router.router_id, num_cancelled=len(router.owned))
        for handle in router.owned.values():
            live = self.lives[handle]
            live.orphaned = True
            if live.sequence.first_admitted_ps is not None:
                first = live.counted is Counted.FIRST_TOKEN or live.sequence.first_token_ps is not None
                counted = Counted.FIRST_TOKEN if first else Counted.ADMISSION
                self._orphans.put((router.router_id, live.request_id), counted)
        self.cancel_all(router, list(router.owned))

    def begin_drain(self) -> None:
        """Refuse new requests and tell the routers."""
        self.core.draining = True
        for router in self.routers:
            router.send(wire.draining())
        if not self.lives:
            self.empty.set()

    # --- the journal ------------------------------------------------------------------------------------------------

    async def keep_journal(self) -> None:
        """Keep the journal's file up to date, until cancelled or until it fails; nothing to do without one."""
        if self.journal is not None:
            await self.journal.keep_flushed(self._gather_steps)

    def close_journal(self) -> None:
        """Write what the journal's file lacks; it is then complete."""
        if self.journal is not None:
            self._gather_steps()
            self.journal.close()

    def _gather_steps(self) -> None:
        for worker in self.workers.values():
            worker.flush_journal()
