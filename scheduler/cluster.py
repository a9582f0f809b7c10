"""All requests and workers of one scheduler: who may come in, who goes where, what happens when a worker goes.

Requests that find no worker wait here (`unplaced`), for `worker_wait_seconds` at most.
"""

import asyncio
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry

from lorrery.chassis.clock import DeviceClock
from lorrery.chassis.log import get_logger
from lorrery.scheduler import wire
from lorrery.scheduler.core.limits import Limits, check_lengths
from lorrery.scheduler.core.placements.base import Candidate
from lorrery.scheduler.core.policies import batch_limits, batching_name
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.journal import Journal
from lorrery.scheduler.live import Live
from lorrery.scheduler.messages import RefusalReason, Submit, WorkerHello
from lorrery.scheduler.metrics import SchedulerMetrics
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.scheduler.routers import RouterLink
from lorrery.scheduler.workers import Dispatcher
from lorrery.settings import Settings
from lorrery.vocabulary import u32
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import NEVER

log = get_logger("scheduler.cluster")


class RefusedError(Exception):
    """A request that may not come in.

    Args:
        reason: for the router.
        message: what, the limit, what to do.
        facts: what the message says, for programs.
    """

    def __init__(self, reason: RefusalReason, message: str, **facts: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.facts = facts


class Cluster:
    """The state of one scheduler."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self.settings = settings
        self.clock = DeviceClock(settings.time_scale)
        self.lives: dict[int, Live] = {}
        self.workers: dict[str, Dispatcher] = {}
        self.routers: set[RouterLink] = set()
        self.unplaced: dict[int, Live] = {}
        self.draining = False
        self.faults_from_ps = 0
        self.empty = asyncio.Event()
        self.metrics = SchedulerMetrics(
            registry,
            workers=lambda: list(self.workers.values()),
            num_unplaced=lambda: len(self.unplaced),
            num_live=lambda: len(self.lives),
            num_routers=lambda: len(self.routers),
        )
        self._num_handles = 0
        self._factory = ReplicaFactory(settings)
        self._placement = self._factory.placement()
        self.adapters = {name: self._factory.adapter(name, rank) for name, rank in settings.adapters.expand()}
        path = settings.scheduler.journal
        self.journal = None if path is None else Journal(path, settings)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit, router: RouterLink) -> None:
        """Take in a request, or refuse it on the spot."""
        at_ps = self.clock.now_ps()
        try:
            adapter = self._known_adapter(submit.adapter_id)
            self._num_handles += 1
            sequence = Sequence(
                handle=self._num_handles,
                prompt_tokens=len(submit.prompt_token_ids_u32) // 4,
                max_new_tokens=submit.max_new_tokens,
                arrived_ps=at_ps,
                adapter=adapter,
                tenant_id=submit.tenant_id,
                prompt_token_ids=u32.unpack(submit.prompt_token_ids_u32),
                output_token_ids=submit.produced,
                produced_tokens=len(submit.produced),
            )
            if not submit.produced:
                self._admissible(sequence, resumed=submit.resumed)
        except RefusedError as refusal:
            self.metrics.requests.labels("refused").inc()
            log.info("request_refused", request_id=submit.request_id, reason=refusal.message)
            if self.journal is not None:
                self.journal.refused(submit.request_id, at_ps, refusal.reason)
            router.refused(submit.handle, refusal.reason, refusal.message, **refusal.facts)
            return
        if self.journal is not None:
            sampling = wire.sampling_record(submit.sampling)
            self.journal.request(sequence, submit.request_id, sampling, resumed=submit.resumed)
        live = Live(
            sequence=sequence,
            router=router,
            router_handle=submit.handle,
            request_id=submit.request_id,
            prompt_token_ids_u32=submit.prompt_token_ids_u32,
            sampling=submit.sampling,
            token_ids=submit.produced,
        )
        self.lives[sequence.handle] = live
        self.empty.clear()
        router.owned[submit.handle] = live
        log.debug("request_arrived", request_id=submit.request_id, handle=sequence.handle, resumed=submit.resumed)
        self._place_or_wait(live, at_ps)

    def cancel(self, router: RouterLink, router_handle: int) -> None:
        """Withdraw a request; unknown handles are ignored, since it may just have ended.

        The router is told at once what the request has consumed, for a stream that it ends by itself needs to say so.
        """
        live = router.owned.get(router_handle)
        if live is None:
            return
        if live.dispatcher is None:
            self.metrics.requests.labels("cancelled").inc()
            if self.journal is not None:
                self.journal.cancelled_unplaced(live.sequence.handle, self.clock.now_ps())
            self.forget(live)
        else:
            worker_id = live.dispatcher.worker_id if live.queue_ps is not None else ""
            router.finished(wire.finished(live, FinishReason.ABORTED, len(live.token_ids), worker_id))
            live.dispatcher.cancel(live, self.clock.now_ps())

    def forget(self, live: Live) -> None:
        """Drop a request that has ended."""
        if live.unplaced is not None:
            live.unplaced.cancel()
        self.unplaced.pop(live.sequence.handle, None)
        self.lives.pop(live.sequence.handle, None)
        live.router.owned.pop(live.router_handle, None)
        if not self.lives:
            self.empty.set()

    def _known_adapter(self, adapter_id: str) -> Adapter | None:
        if not adapter_id:
            return None
        adapter = self.adapters.get(adapter_id)
        if adapter is None:
            raise RefusedError(
                RefusalReason.UNKNOWN_ADAPTER,
                f"adapter_id {adapter_id!r} is not known; {len(self.adapters)} adapters are, see ListAdapters",
                field="adapter_id",
                value=adapter_id,
            )
        return adapter

    def _admissible(self, sequence: Sequence, *, resumed: bool) -> None:
        if self.draining:
            raise RefusedError(RefusalReason.DRAINING, "the scheduler is about to stop")
        if sequence.prompt_tokens < 1 or sequence.max_new_tokens < 1:
            raise RefusedError(
                RefusalReason.INVALID,
                f"prompt has {sequence.prompt_tokens} tokens and max_new_tokens is {sequence.max_new_tokens};"
                " both must be at least 1",
            )
        limits = self.limits
        wrong = check_lengths(sequence.prompt_tokens, sequence.max_new_tokens, limits)
        if wrong is not None:
            raise RefusedError(
                RefusalReason.NEVER_FITS,
                f"{wrong} (prompt has {sequence.prompt_tokens} tokens, max_new_tokens is {sequence.max_new_tokens};"
                f" max_req_input_len is {limits.max_req_input_len}, max_req_total_len is {limits.max_req_total_len})",
                prompt_tokens=sequence.prompt_tokens,
                max_new_tokens=sequence.max_new_tokens,
                max_req_input_len=limits.max_req_input_len,
                max_req_total_len=limits.max_req_total_len,
            )
        most = self.settings.scheduler.max_waiting_requests
        num_waiting = len(self.unplaced) + sum(worker.replica.num_waiting for worker in self.workers.values())
        # What a scheduler before this one took in is not turned away because it comes in all at once.
        if num_waiting >= most and not resumed:
            raise RefusedError(
                RefusalReason.QUEUE_FULL,
                f"{num_waiting} requests wait; max_waiting_requests is {most}; try later",
                field="max_waiting_requests",
                value=num_waiting,
                limit=most,
            )

    @property
    def limits(self) -> Limits:
        """Length limits; the pool is the largest attached one."""
        own = self.settings.scheduler
        pool = own.max_total_token_num
        if pool is None:
            pool = max((worker.max_total_token_num for worker in self.workers.values()), default=NEVER)
        return Limits(own.max_req_input_len, own.max_req_total_len, pool)

    # --- placing ----------------------------------------------------------------------------------------------------

    def _place_or_wait(self, live: Live, at_ps: int) -> None:
        ready = [worker for worker in self.workers.values() if not worker.draining]
        reasons = [worker.replica.why_never(live.sequence) for worker in ready]
        fitting = {worker.worker_id: worker for worker, why in zip(ready, reasons, strict=True) if why is None}
        if fitting:
            self.unplaced.pop(live.sequence.handle, None)
            if live.unplaced is not None:
                live.unplaced.cancel()
                live.unplaced = None
            candidates = [Candidate(name, worker.replica) for name, worker in fitting.items()]
            choice = self._placement.place(live.sequence, candidates)
            if self.settings.scheduler.log_placement:
                log.info("placed", request_id=live.request_id, worker_id=choice.candidate.name, why=choice.why)
            fitting[choice.candidate.name].submit(live, at_ps)
        elif ready:
            facts = {"prompt_tokens": live.sequence.prompt_tokens, "max_new_tokens": live.sequence.max_new_tokens}
            self._end(live, RefusalReason.NEVER_FITS, f"no attached worker can ever take it: {reasons[0]}", facts)
        elif live.unplaced is None:
            live.dispatcher = None
            self.unplaced[live.sequence.handle] = live
            wait = self.settings.scheduler.worker_wait_seconds
            live.unplaced = asyncio.get_running_loop().call_later(
                wait,
                self._end,
                live,
                RefusalReason.NO_WORKER,
                f"no worker has attached for {wait:g} s (worker_wait_seconds)",
                {"field": "worker_wait_seconds", "limit": wait},
            )

    def _end(self, live: Live, reason: RefusalReason, message: str, facts: Mapping[str, object]) -> None:
        self.metrics.requests.labels("refused").inc()
        log.info("request_refused", request_id=live.request_id, reason=message)
        if self.journal is not None:
            self.journal.refused(live.request_id, self.clock.now_ps(), reason, live.sequence.handle)
        live.router.refused(live.router_handle, reason, message, **facts)
        self.forget(live)

    def _place_again(self, sequences: list[Sequence]) -> None:
        at_ps = self.clock.now_ps()
        for sequence in sequences:
            live = self.lives[sequence.handle]
            live.dispatcher = None
            self._place_or_wait(live, at_ps)

    # --- workers ----------------------------------------------------------------------------------------------------

    def attach(self, hello: WorkerHello) -> Dispatcher:
        """Take in a worker and give it what waits for one.

        Raises:
            ValueError: it announces another base model, or an id that is attached.
        """
        if hello.model != self.settings.model:
            raise ValueError(
                f"worker {hello.worker_id} serves {hello.model}; this cluster serves {self.settings.model}"
            )
        if hello.worker_id in self.workers:
            raise ValueError(f"worker {hello.worker_id} is attached already")
        settings = self._factory.replica_settings(hello)
        at_ps = self.clock.now_ps()
        self.faults_from_ps = self._factory.begin_faults(at_ps)
        journal = None if self.journal is None else self.journal.attached(hello, at_ps)
        worker = Dispatcher(hello, self._factory.replica(settings), settings.max_total_token_num, self, journal)
        self.workers[hello.worker_id] = worker
        log.info(
            "worker_attached",
            worker_id=hello.worker_id,
            gpu=hello.gpu,
            policy=settings.policy,
            batching=batching_name(settings),
            max_total_token_num=settings.max_total_token_num,
            batch_max_tokens=batch_limits(settings).max_prompt_tokens,
        )
        self._place_again([live.sequence for live in list(self.unplaced.values())])
        return worker

    def drain_worker(self, worker: Dispatcher) -> None:
        """Give a worker nothing new; what waits in its queue goes elsewhere, what runs stays."""
        worker.draining = True
        log.info("worker_draining", worker_id=worker.worker_id, num_running=worker.replica.num_running)
        self._place_again(worker.give_back_waiting(self.clock.now_ps()))

    def detach(self, worker: Dispatcher) -> None:
        """Forget a worker whose stream has ended, and queue again what it had."""
        del self.workers[worker.worker_id]
        unfinished = worker.lose(self.clock.now_ps())
        self.metrics.requeued.inc(len(unfinished))
        if not worker.draining:
            self.metrics.workers_lost.inc()
        log.info(
            "worker_left" if worker.draining else "worker_lost",
            worker_id=worker.worker_id,
            num_requeued=len(unfinished),
        )
        self._place_again(unfinished)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def register(self, adapter_id: str, rank: int) -> Adapter:
        """Take in an adapter; return the one that is known by its name."""
        if adapter_id not in self.adapters:
            self.adapters[adapter_id] = self._factory.adapter(adapter_id, rank)
            if self.journal is not None:
                self.journal.adapter(adapter_id, rank, self.clock.now_ps())
        return self.adapters[adapter_id]

    def unregister(self, adapter_id: str) -> bool:
        """Forget an adapter; return whether it was known."""
        if self.adapters.pop(adapter_id, None) is None:
            return False
        if self.journal is not None:
            self.journal.adapter_removed(adapter_id, self.clock.now_ps())
        return True

    # --- routers ----------------------------------------------------------------------------------------------------

    def connect(self, router_id: str, adapters: Iterable[Adapter], unloaded: Iterable[str]) -> RouterLink:
        """Take in a router, and what it was told of adapters at run time: those loaded, and those unloaded."""
        for adapter_id in unloaded:
            self.unregister(adapter_id)
        for adapter in adapters:
            self.register(adapter.adapter_id, adapter.rank)
        router = RouterLink(router_id, self.clock, self.settings.scheduler.max_pending_router_tokens)
        self.routers.add(router)
        log.info("router_connected", router_id=router_id, num_adapters=len(self.adapters))
        return router

    def disconnect(self, router: RouterLink) -> None:
        """Cancel what a router owned whose stream has ended."""
        self.routers.discard(router)
        log.info("router_disconnected", router_id=router.router_id, num_cancelled=len(router.owned))
        for router_handle in list(router.owned):
            self.cancel(router, router_handle)

    def begin_drain(self) -> None:
        """Refuse new requests and tell the routers."""
        self.draining = True
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
