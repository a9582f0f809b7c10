"""The requests of one scheduler, live: they arrive, are placed and end as the core decides.

The driver stamps inputs with its clock, hands them to `scheduler.core.cluster`, publishes the facts, and carries out
what they ask for: at the workers and at the routers.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from lorrery.scheduler import wire_routers
from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import Arrived, ClusterEvent, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import (
    Admitted,
    Cancelled,
    Dropped,
    Event,
    Facts,
    Failed,
    Finished,
    FirstToken,
    Preempted,
    Raised,
    Recalled,
)
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.prefix_cache.base import of_u32
from lorrery.scheduler.core.refusals import Refusal, withheld
from lorrery.scheduler.core.sequence import Sequence as CoreSequence
from lorrery.scheduler.messages import Submit
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.scheduler.routers import LiveRequest, RouterLink
from lorrery.scheduler.subscribers.metrics import Counted, SchedulerMetrics
from lorrery.service.clocks import DeviceClock, UptimeClock
from lorrery.service.names import Recent
from lorrery.service.tasks import Slices
from lorrery.service.telemetry.log import BoundedLog, get_logger
from lorrery.service.telemetry.spans import TraceContext, log_fields
from lorrery.vocabulary import u32
from lorrery.vocabulary.endings import CancelCause, FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

MAX_REMEMBERED = 10_000
"""Logged errors, and requests of routers that left: keys that peers name are not remembered for ever."""

AFTER_STOP_SECONDS = 1.0
"""How long a scheduler that stood still runs before it ends a wait for a worker."""

log = get_logger("scheduler.requests")


class Worker(Protocol):
    """An attached worker, as far as requests concern it."""

    def placed(self, event: Placed, at_ps: int) -> None:
        """Handle a request that the core has given this worker."""
        ...

    def withdrawn(self, event: Withdrawn, at_ps: int) -> None:
        """Handle a request of this worker that has been cancelled."""
        ...

    def retired(self, adapter_key: str, at_ps: int) -> None:
        """Release an adapter that no further request will name, once no sequence has it."""
        ...


class Requests:
    """The requests that have arrived and not ended.

    Args:
        core: decides.
        facts: of the scheduler.
        lives: requests, by the scheduler's handle.
        workers: attached, by name; placed requests go to them.
        factory: builds the adapters that resumed requests bring.
        metrics: count what is no request yet.
        clock: device clock.
        uptime: counts the seconds in which this process ran.
        slices: runs work that may concern ten thousand requests at once.
        log_placement: whether placements are logged.

    Attributes:
        empty: set while there are no requests.
    """

    def __init__(
        self,
        core: ClusterCore,
        facts: Facts,
        lives: dict[int, LiveRequest],
        workers: Mapping[str, Worker],
        factory: ReplicaFactory,
        metrics: SchedulerMetrics,
        *,
        clock: DeviceClock,
        uptime: UptimeClock,
        slices: Slices,
        log_placement: bool,
    ) -> None:
        self.lives = lives
        self.empty = asyncio.Event()
        self._core = core
        self._facts = facts
        self._workers = workers
        self._factory = factory
        self._metrics = metrics
        self._clock = clock
        self._uptime = uptime
        self._slices = slices
        self._log_placement = log_placement
        self._num_handles = 0
        self._release_soon: asyncio.Handle | None = None
        self._wait_timer: asyncio.TimerHandle | None = None
        self._waits_until_ps: int | None = None
        self._logged_errors: Recent[str, bool] = Recent(MAX_REMEMBERED)
        self._log_refused = BoundedLog(log, "request_refused")
        self._orphans: Recent[tuple[str, str], Counted] = Recent(MAX_REMEMBERED)

    def submit(self, submit: Submit, router: RouterLink) -> None:
        """Accept a request, or refuse it at once."""
        if submit.only_counted_tokens is not None:
            self._count(submit, submit.only_counted_tokens, router)
            return
        counted = self._take_over(submit, router) if submit.resumed else Counted.NOTHING
        at_ps = self._clock.now_ps()
        self._num_handles += 1
        sequence = CoreSequence(
            handle=self._num_handles,
            prompt_tokens=len(submit.prompt_token_ids_u32) // 4,
            max_new_tokens=submit.max_new_tokens,
            arrived_ps=at_ps,
            tenant_id=submit.tenant_id,
            prompt_token_ids=u32.unpack(submit.prompt_token_ids_u32),
            output_token_ids=submit.produced,
            produced_tokens=len(submit.produced),
        )
        sequence.priority = submit.priority
        sequence.cache_salt = submit.cache_salt
        if not submit.produced:
            sequence.content = of_u32(submit.prompt_token_ids_u32)  # the same bytes, for caches that compare them
        sequence.ignore_eos = submit.ignore_eos
        sequence.skips_prefix_cache = submit.skips_prefix_cache
        if submit.time_left_ps:
            sequence.deadline_ps = at_ps + submit.time_left_ps
        pinned = None
        if submit.resumed and submit.adapter_version and submit.adapter_rank:
            pinned = self._factory.adapter(submit.adapter_id, submit.adapter_rank, submit.adapter_version)
        events = self._core.submit(
            sequence,
            at_ps,
            adapter_id=submit.adapter_id,
            resumed=submit.resumed,
            pinned=pinned,
            quota=submit.quota,
        )
        refused = next((event for event in events if isinstance(event, Refused)), None)
        self.lives[sequence.handle] = LiveRequest(
            sequence=sequence,
            router=router,
            router_handle=submit.handle,
            request_id=submit.request_id,
            adapter_id=submit.adapter_id,
            prompt_token_ids_u32=submit.prompt_token_ids_u32,
            sampling=submit.sampling,
            token_ids=submit.produced,
            counted=counted,
            group=submit.group,
            context=submit.trace,
        )
        accepted = refused is None or refused.figures is not None
        self._facts.publish((Arrived(sequence, submit.resumed, accepted),), at_ps)
        if refused is not None:
            self._carry_out(events, at_ps)
            return
        adapter = sequence.adapter
        if adapter is not None and adapter.version != submit.adapter_version:
            router.send(wire_routers.adapter_pinned(submit.handle, adapter))
        self.empty.clear()
        router.owned[submit.handle] = sequence.handle
        log.debug(
            "request_arrived",
            request_id=submit.request_id,
            handle=sequence.handle,
            resumed=submit.resumed,
            **log_fields(submit.trace),
        )
        self._carry_out(events, at_ps)

    def _count(self, submit: Submit, tokens: int, router: RouterLink) -> None:
        """Count a request that is not to be generated, or refuse it; in the journal and the metrics it is none."""
        at_ps = self._clock.now_ps()
        refusal = None if submit.quota is None else self._core.charge(tokens, submit.quota, at_ps)
        if refusal is not None:
            router.refused(submit.handle, withheld(refusal))
            return
        sequence = CoreSequence(handle=0, prompt_tokens=tokens, max_new_tokens=0, arrived_ps=at_ps)
        router.finished(wire_routers.finished(submit.handle, sequence, FinishReason.LENGTH, 0, "", at_ps))

    def _take_over(self, submit: Submit, router: RouterLink) -> Counted:
        """End what is left of a resumed request on the stream that broke; return how much of it was counted."""
        key = router.router_id, submit.request_id
        live = self.lives.get(router.earlier.pop(submit.request_id, 0))
        if live is not None and not live.orphaned:
            self._orphan(live)
            self.cancel(live.router, live.router_handle, CancelCause.ROUTER_LEFT)
        orphaned = self._orphans.pop(key)
        return Counted.FIRST_TOKEN if submit.produced else orphaned or Counted.NOTHING

    def cancel(
        self, router: RouterLink, router_handle: int, cause: CancelCause, kept_tokens: int | None = None
    ) -> None:
        """Withdraw a request; unknown handles are ignored, since it may just have ended.

        Args:
            router: that it came from.
            router_handle: its handle on that router's stream.
            cause: why.
            kept_tokens: output that its client has, or would have; None: all that it has produced.
        """
        handle = router.owned.get(router_handle)
        if handle is not None:
            at_ps, sequence = self._clock.now_ps(), self.lives[handle].sequence
            kept = None if kept_tokens is None else min(kept_tokens, sequence.max_new_tokens)
            self._carry_out(self._core.cancel(sequence, at_ps, cause, kept), at_ps)

    def cancel_all(self, router: RouterLink, cancels: Iterable[tuple[int, int | None]], cause: CancelCause) -> None:
        """Withdraw many requests, each by its handle and the tokens that it keeps, in slices."""

        def cancel_each() -> Iterator[None]:
            for router_handle, kept_tokens in cancels:
                self.cancel(router, router_handle, cause, kept_tokens)
                yield

        self._slices.do(cancel_each())

    def forget(self, live: LiveRequest) -> None:
        """Drop a request that has ended, and stop counting it against its API key."""
        if self.lives.pop(live.sequence.handle, None) is not None:
            may_release = self._core.ended(live.sequence, live.output_tokens, self._clock.now_ps())
            if may_release and self._release_soon is None:
                # Not at once: the worker whose step has ended it is about to get its next plan.
                self._release_soon = asyncio.get_running_loop().call_soon(self._release)
        live.router.owned.pop(live.router_handle, None)
        self.tell_if_empty()

    def tell_if_empty(self) -> None:
        """Set `empty` if there are no requests."""
        if not self.lives:
            self.empty.set()

    def orphan(self, router: RouterLink) -> None:
        """Cancel the requests of a router whose stream has ended."""
        for handle in router.owned.values():
            if not (live := self.lives[handle]).orphaned:
                self._orphan(live)
        self.cancel_all(router, [(handle, None) for handle in router.owned], CancelCause.ROUTER_LEFT)

    def of(self, routers: Iterable[RouterLink]) -> dict[str, int]:
        """Return the handles of the requests of these streams, by request ID."""
        return {self.lives[handle].request_id: handle for router in routers for handle in router.owned.values()}

    def _orphan(self, live: LiveRequest) -> None:
        """Note that a request's stream has broken, and remember how much of it was counted, for its resumption."""
        live.orphaned = True
        counted = live.counted
        if live.sequence.first_token_ps is not None:
            counted = Counted.FIRST_TOKEN
        elif live.sequence.first_admitted_ps is not None:
            counted = max(counted, Counted.ADMISSION)
        if counted is not Counted.NOTHING:
            self._orphans.put((live.router.router_id, live.request_id), counted)

    def _release(self) -> None:
        """Place held requests whose API key has a free slot."""
        self._release_soon = None
        at_ps = self._clock.now_ps()
        self.place(self._core.release(at_ps), at_ps)

    def _forget_all(self, lives: Collection[LiveRequest]) -> None:
        """Drop cancelled requests, in slices: a router that leaves may have thousands."""

        def forget_each() -> Iterator[None]:
            for live in lives:
                self.forget(live)
                yield

        self._slices.do(forget_each())

    # --- decisions of the core --------------------------------------------------------------------------------------

    def _carry_out(self, events: Sequence[ClusterEvent], at_ps: int) -> None:
        """Publish decisions about requests, and carry them out."""
        self._facts.publish(events, at_ps)
        for event in events:
            live = self.lives[event.sequence.handle]
            if isinstance(event, Placed):
                worker = self._workers[event.member.name]
                if self._log_placement:
                    fields = {"request_id": live.request_id, "worker_id": event.member.name, "why": event.why}
                    log.info("placed", **fields, **log_fields(live.context))
                worker.placed(event, at_ps)
                adapter = event.sequence.adapter
                if adapter is not None and self._core.is_out_of_use(adapter):
                    worker.retired(adapter.key, at_ps)
            elif isinstance(event, Refused):
                if event.error is not None:
                    self._log_error(event.refusal.message, event.error)
                self._tell_refused(live, event.refusal)
                if event.on_arrival:
                    del self.lives[event.sequence.handle]
                else:
                    self.forget(live)
            elif isinstance(event, Withdrawn):
                if event.refusal is not None:
                    self._tell_refused(live, event.refusal)
                else:
                    # The router is told of the usage at once: a stream that it ends by itself has to report it.
                    worker_id = event.member.name if event.sequence.first_admitted_ps is not None else ""
                    self._tell_finished(live, FinishReason.ABORTED, len(live.token_ids), worker_id, at_ps)
                self._workers[event.member.name].withdrawn(event, at_ps)
            elif isinstance(event, Finished):
                self.forget(live)
            else:
                self._forget_all([live])
        self._watch_waits()

    def carry_out(self, events: Iterable[Event], member: Member) -> None:
        """Carry out what a worker's decisions and steps mean for requests; the facts have been published."""
        lives, cancelled, recalled = self.lives, list[LiveRequest](), list[Recalled]()
        for event in events:
            if isinstance(event, (Admitted, FirstToken)):
                continue
            if isinstance(event, Finished):
                live = lives[event.sequence.handle]
                if event.sequence.withdrawal is None:  # the router of a cancelled one was told at once
                    self._tell_finished(live, event.reason, event.output_tokens, member.name, event.at_ps)
                self.forget(live)
            elif isinstance(event, Cancelled):
                cancelled.append(lives[event.sequence.handle])
            elif isinstance(event, Recalled):
                recalled.append(event)
            elif isinstance(event, Preempted):
                live, produced_tokens = lives[event.sequence.handle], event.sequence.produced_tokens
                if len(live.token_ids) > produced_tokens:  # `core.overlap`
                    live.num_repeats += len(live.token_ids) - produced_tokens
                    del live.token_ids[produced_tokens:]
            elif isinstance(event, Dropped):
                self._end(lives[event.sequence.handle], refusals.dropped(event.sequence, event.reason))
            elif isinstance(event, Failed):
                self._end(lives[event.sequence.handle], refusals.raised(event.message))
            elif isinstance(event, Raised):
                self._log_error(event.message, event.error)
        if cancelled:
            self._forget_all(cancelled)
        if recalled:
            self._take_recalled(recalled, member)

    def _end(self, live: LiveRequest, refusal: Refusal) -> None:
        live.router.refused(live.router_handle, withheld(refusal))
        self.forget(live)

    def place(self, events: Sequence[ClusterEvent], at_ps: int) -> None:
        """Carry out events of a change of workers, and place the remaining untried requests, in slices."""
        self._carry_out(events, at_ps)
        self._slices.do(self._place_rest())

    def _place_rest(self) -> Iterator[None]:
        while self._core.is_placing:
            at_ps = self._clock.now_ps()
            self._carry_out(self._core.place_again(at_ps), at_ps)
            yield

    def _take_recalled(self, recalled: Iterable[Recalled], donor: Member) -> None:
        """Give recalled requests that have left their worker to another, all at once: they can join together."""
        at_ps = self._clock.now_ps()
        self._carry_out([event for one in recalled for event in self._core.take_recalled(one, donor, at_ps)], at_ps)

    def _tell_finished(
        self, live: LiveRequest, reason: FinishReason, output_tokens: int, worker_id: str, at_ps: int
    ) -> None:
        sequence, handle = live.sequence, live.router_handle
        live.router.finished(wire_routers.finished(handle, sequence, reason, output_tokens, worker_id, at_ps))

    def _tell_refused(self, live: LiveRequest, refusal: Refusal) -> None:
        self._refuse(live.router, live.router_handle, live.request_id, refusal, live.context)

    def refuse(self, router: RouterLink, router_handle: int, request_id: str, refusal: Refusal) -> None:
        """Refuse what is no request of the core: it could not be read."""
        self._metrics.refused(refusal)
        self._refuse(router, router_handle, request_id, refusal, None)

    def _refuse(
        self, router: RouterLink, router_handle: int, request_id: str, refusal: Refusal, context: TraceContext | None
    ) -> None:
        """Tell a router that a request, which is part of the span `context`, ends without (further) tokens."""
        kind = refusal.reason.name.lower()
        self._log_refused.say(kind, request_id=request_id, reason=refusal.message, **log_fields(context))
        router.refused(router_handle, withheld(refusal))

    def _log_error(self, message: str, error: Exception) -> None:
        """Log a policy's exception with its traceback; each message once, as it may occur for every request."""
        if message not in self._logged_errors:
            self._logged_errors.put(message, True)
            log.error("policy_raised", reason=message, exc_info=error)

    def expect_no_worker(self) -> None:
        """Refuse requests that wait for a worker, and those that would have to."""
        self._core.expect_no_worker(self._clock.now_ps())
        self._watch_waits()

    def _watch_waits(self) -> None:
        """Set the timer for the end of the first wait for a worker."""
        until_ps = self._core.until_ps
        if until_ps == self._waits_until_ps:
            return
        if self._wait_timer is not None:
            self._wait_timer.cancel()
        self._waits_until_ps = until_ps
        if until_ps is not None:
            seconds = (until_ps - self._clock.now_ps()) / PS_PER_SECOND * self._clock.time_scale
            self._wait_timer = asyncio.get_running_loop().call_later(seconds, self._end_waits, until_ps)

    def _end_waits(self, until_ps: int) -> None:
        missing = AFTER_STOP_SECONDS - self._uptime.steady_seconds()
        if missing > 0:  # a worker's hello may wait in a socket
            self._wait_timer = asyncio.get_running_loop().call_later(missing, self._end_waits, until_ps)
            return
        self._waits_until_ps = None
        at_ps = max(until_ps, self._clock.now_ps())  # a timer may fire a little early
        self._carry_out(self._core.expire(at_ps), at_ps)
