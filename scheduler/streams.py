"""The streams of a scheduler: a router's, with requests and cancels, and a worker's, with steps and heartbeats."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from lorrery.scheduler import wire_routers, wire_workers
from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.core import refusals
from lorrery.scheduler.liveness import Loss
from lorrery.scheduler.messages import Load, ProtocolError
from lorrery.scheduler.routers import RouterLink
from lorrery.scheduler.workers import INTERNAL, Dispatcher
from lorrery.service.clocks import UptimeClock
from lorrery.service.errors import Conflict, InvalidRequest, Reason, WorkerGivenUp, WrongWorker
from lorrery.service.names import quoted, too_long, why_no_name
from lorrery.service.network import status
from lorrery.service.network.calls import Writes
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import until_first_ends
from lorrery.service.telemetry.log import get_logger
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary.units import from_wire

HELLO_SECONDS = 10.0
"""How long a stream may be open before its hello."""

_Request = TypeVar("_Request", pb.RouteRequest, pb.AttachRequest)
_Response = TypeVar("_Response", pb.RouteResponse, pb.AttachResponse)


async def first_message(
    requests: AsyncIterator[_Request], context: grpc.aio.ServicerContext[_Request, _Response], uptime: UptimeClock
) -> _Request:
    """Return a stream's first message, which must be a hello and come in time.

    Raises:
        InvalidRequest: it is not a hello.
        AbortError: it did not come; the stream has its status.
    """
    try:
        first = await uptime.within(HELLO_SECONDS, anext(requests, None))
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_SECONDS:g} s")
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidRequest("the first message must be hello", field="hello")
    return first


LOAD_SECONDS = 0.1
"""Interval between two load messages to a router."""

log = get_logger("scheduler")


class RouteStreams:
    """Serves Route streams.

    Args:
        settings: of the cluster.
        cluster: that the requests go to.
    """

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self._settings, self._cluster = settings, cluster

    async def serve(
        self,
        requests: AsyncIterator[pb.RouteRequest],
        context: grpc.aio.ServicerContext[pb.RouteRequest, pb.RouteResponse],
    ) -> None:
        """Serve one stream until it ends.

        Raises:
            RequestError: alone or in a group: an invalid message.
        """
        theirs = (await first_message(requests, context, self._cluster.uptime)).hello
        if (why := too_long(theirs.router_id)) is not None:
            raise InvalidRequest(f"router_id {why}", field="router_id")
        changes = theirs.adapter_changes
        await self._cluster.adapters.learn(wire_routers.read_changes(changes), changes.forgotten)
        router = self._cluster.connect(theirs.router_id)
        try:
            # No await in between: the hello has all changes so far, and later ones follow it.
            settings, adapter_log = self._settings, self._cluster.adapters.log
            hello = wire_routers.scheduler_hello(settings.model, settings.time_scale, adapter_log)
            if self._cluster.core.draining:
                router.send(wire_routers.draining())
            # Before anything that may cancel it: gRPC sends no status if the first write was interrupted.
            await self._cluster.uptime.within(self._settings.scheduler.router_timeout_seconds, context.write(hello))
            await until_first_ends(
                self._read_router(requests, router),
                self._write_router(context.write, router),
                router.until_overrun(),
                *([self._say_load(router)] if theirs.wants_load else []),
            )
        finally:
            self._cluster.disconnect(router)

    async def _write_router(self, write: Callable[[pb.RouteResponse], Awaitable[None]], router: RouterLink) -> None:
        """Write pending messages for a router, until a write takes too long."""
        seconds = self._settings.scheduler.router_timeout_seconds
        writes: Writes[RouterLink] = Writes(self._cluster.uptime, seconds)

        async def until_stuck() -> None:
            await writes.stuck()
            log.warning("router_too_slow", router_id=router.router_id, seconds=seconds)

        await until_first_ends(router.write_all(lambda message: writes.write(router, write(message))), until_stuck())

    async def _say_load(self, router: RouterLink) -> None:
        """Send a router the load, whenever it has changed."""
        said: Load | None = None
        while True:
            if (load := self._cluster.load) != said:
                router.send(wire_routers.scheduler_load(load))
                said = load
            await asyncio.sleep(LOAD_SECONDS)

    async def _read_router(self, requests: AsyncIterator[pb.RouteRequest], router: RouterLink) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "submit":
                self._submit(request.submit, router)
            elif kind == "cancel_handles_u32":
                cancels, cause = wire_routers.read_cancels(request)
                self._cluster.requests.cancel_all(router, cancels, cause)
            elif kind == "adapter_changes":
                changes = request.adapter_changes
                forgotten = changes.forgotten if changes.whole else None
                await self._cluster.adapters.learn(wire_routers.read_changes(changes), forgotten, router)

    def _submit(self, message: pb.Submit, router: RouterLink) -> None:
        """Submit a request; one that cannot be read is refused, and the stream goes on."""
        if message.handle in router.owned:  # a refusal would end the request that has the handle
            log.warning("submit_ignored", router_id=router.router_id, reason=f"handle {message.handle} is taken")
            return
        try:
            submit = wire_routers.read_submit(message)
        except ValueError as error:
            self._cluster.requests.refuse(
                router, message.handle, quoted(message.request_id), refusals.malformed(str(error))
            )
        else:
            self._cluster.requests.submit(submit, router)


class AttachStreams:
    """Serves Attach streams.

    Args:
        settings: of the cluster.
        cluster: which the workers join.
    """

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self._settings, self._cluster = settings, cluster
        self._timeout_seconds = settings.scheduler.worker_timeout_seconds

    async def serve(
        self,
        requests: AsyncIterator[pb.AttachRequest],
        context: grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse],
    ) -> None:
        """Serve one stream until it ends.

        Raises:
            RequestError: alone or in a group: an invalid message, or the worker was given up.
        """
        hello = (await first_message(requests, context, self._cluster.uptime)).hello
        name = hello.worker_id
        if (why := why_no_name(name)) is not None:
            await status.abort(context, InvalidRequest(f"worker_id {why}; see worker.name", field="worker_id"))
        try:
            announced = wire_workers.read_worker_hello(hello)
        except ProtocolError as error:
            raise InvalidRequest(str(error)) from None
        if 2 * hello.heartbeat_seconds > self._timeout_seconds:
            await status.abort(context, _heartbeats_too_rare(hello.heartbeat_seconds, self._timeout_seconds))
        old = self._cluster.workers.get(name)
        if old is not None and hello.instance_id and old.instance_id == hello.instance_id:
            old.give_up(Loss.SUPERSEDED, "the worker has dialled again")
            self._cluster.detach(old)
        elif old is not None:
            log.warning("worker_refused", worker_id=name, reason="its name is taken")
            message = (
                f"a worker named {quoted(name)} is attached already; each needs a name of its own:"
                " set worker.name, or leave it unset for HOST-PID"
            )
            await status.abort(context, Conflict(message, Reason.NAME_TAKEN, field="worker.name", value=quoted(name)))
        try:
            kv_source = hello.kv_events if hello.HasField("kv_events") else None
            worker = self._cluster.attach(announced, hello.instance_id, kv_source)
        except (ValueError, LookupError) as error:
            log.warning("worker_refused", worker_id=name, reason=str(error))
            raise WrongWorker(str(error)) from None
        try:
            now_ps, faults_from_ps = self._cluster.clock.now_ps(), self._cluster.faults.from_ps
            unix_ns = self._cluster.traces.unix_ns(now_ps)
            await context.write(wire_workers.welcome(self._settings.time_scale, now_ps, faults_from_ps, unix_ns))
            await until_first_ends(
                self._read_worker(requests, worker),
                worker.outbox.write_all(context.write),
                worker.until_given_up(),
                self._watch(worker),
            )
        finally:
            self._cluster.detach(worker)
        if worker.loss:
            raise WorkerGivenUp(worker.loss)

    async def _read_worker(self, messages: AsyncIterator[pb.AttachRequest], worker: Dispatcher) -> None:
        async for message in messages:
            worker.watch.heard(self._cluster.uptime.now())
            try:
                self._receive(message, worker)
            except ProtocolError as error:
                worker.give_up(Loss.PROTOCOL, str(error))
            except Exception as error:
                worker.give_up(Loss.ERROR, INTERNAL, error)

    def _receive(self, message: pb.AttachRequest, worker: Dispatcher) -> None:
        kind, now_ps = message.WhichOneof("message"), self._cluster.clock.now_ps()
        if kind == "step":
            worker.step_done(wire_workers.read_step(message.step, now_ps))
        elif kind == "draining":
            self._cluster.drain_worker(worker)
        elif kind == "heartbeat":
            beat = message.heartbeat
            if beat.number:
                worker.answer(beat.number, now_ps)
            if beat.plan_id:
                worker.promised(beat.plan_id, from_wire(beat.step_end_ps, now_ps))
        elif kind == "faults_taken":
            worker.faults_taken(from_wire(message.faults_taken.from_ps, now_ps))
        elif kind == "hello":
            raise ProtocolError("hello is the first message, and no other")

    async def _watch(self, worker: Dispatcher) -> None:
        """Give up a worker that is silent, or makes no progress with its plan, for too long."""
        uptime, watch = self._cluster.uptime, worker.watch
        while (loss := watch.loss(uptime.now())) is None:
            await uptime.sleep_until(watch.due)
        limit = f"for {self._timeout_seconds:g} s (worker_timeout_seconds)"
        said = "nothing was heard of the worker" if loss is Loss.SILENT else "the worker made no progress with its plan"
        worker.give_up(loss, f"{said} {limit}")


def _heartbeats_too_rare(every_seconds: float, timeout_seconds: float) -> InvalidRequest:
    return InvalidRequest(
        f"the worker beats every {every_seconds:g} s; worker.heartbeat_seconds must be at most half of"
        f" scheduler.worker_timeout_seconds ({timeout_seconds:g})",
        field="worker.heartbeat_seconds",
        value=every_seconds,
        limit=timeout_seconds / 2,
    )
