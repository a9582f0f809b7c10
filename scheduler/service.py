"""SchedulerService: the streams of routers and workers, and the calls of operators."""

import asyncio
import atexit
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from lorrery.chassis import status
from lorrery.chassis.errors import (
    Conflict,
    InvalidRequest,
    Overloaded,
    RankOverLimit,
    Reason,
    RequestError,
    UnknownName,
    WorkerGivenUp,
    WrongWorker,
)
from lorrery.chassis.exposure import warn_if_exposed
from lorrery.chassis.log import get_logger
from lorrery.chassis.names import quoted, too_long, why_no_name
from lorrery.chassis.tasks import until_first_ends
from lorrery.chassis.tracing import open_tracer
from lorrery.chassis.writes import Writes
from lorrery.scheduler import wire, wire_routers, wire_workers
from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.core import refusals
from lorrery.scheduler.guard import OPERATORS, ROUTERS, WORKERS, Guard
from lorrery.scheduler.messages import Load, ProtocolError
from lorrery.scheduler.routers import RouterLink
from lorrery.scheduler.watch import Loss
from lorrery.scheduler.workers import INTERNAL, Dispatcher
from lorrery.settings import Settings
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc, types_pb2
from lorrery.vocabulary import u32
from lorrery.vocabulary.adapter_log import AdapterChange
from lorrery.vocabulary.wire_time import from_wire

HELLO_SECONDS = 10.0
"""How long a stream may be open before it says whose it is."""
LOAD_SECONDS = 0.1
"""Between two messages to a router about how much there is to do."""

_Request = TypeVar("_Request", pb.RouteRequest, pb.AttachRequest)
_Response = TypeVar("_Response", pb.RouteResponse, pb.AttachResponse)

log = get_logger("scheduler")


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """A scheduler process."""

    name = "scheduler"

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._guard = Guard(settings)
        self.tracer = open_tracer(settings.tracing, self.name, registry)
        self._cluster = Cluster(settings, registry, self.tracer)
        self._timeout_seconds = settings.scheduler.worker_timeout_seconds

    @property
    def receive_bytes(self) -> int:
        """See `Service`."""
        return self._settings.scheduler.submit_bytes

    # --- the process ------------------------------------------------------------------------------------------------

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add this service to a server."""
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)
        return [pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name]

    async def listen(self) -> Mapping[str, str]:
        """See `Service`: nowhere else."""
        return {}

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Be ready; everything happens in the streams, the last of it after this has ended."""
        if self._cluster.journal is not None:
            atexit.register(self._cluster.close_journal)
        warn_if_exposed(
            "scheduler.listen",
            self._settings.scheduler.listen,
            self._settings.server_tls,
            protected=self._guard.protects,
            cure="set cluster_token, or server_tls with ca",
        )
        await set_ready(True)
        try:
            await self._cluster.keep_journal()
            await asyncio.Event().wait()
        finally:
            self._cluster.end_traces()

    async def drain(self) -> None:
        """Refuse new requests; return when the last one has ended."""
        self._cluster.begin_drain()
        await self._cluster.requests.empty.wait()

    # --- routers ----------------------------------------------------------------------------------------------------

    async def Route(  # type: ignore[override]  # noqa: N802, D102  as the wire calls it; writes by itself
        self,
        request_iterator: AsyncIterator[pb.RouteRequest],
        context: grpc.aio.ServicerContext[pb.RouteRequest, pb.RouteResponse],
    ) -> None:
        await self._guard.check(context, ROUTERS)
        theirs = (await self._first(request_iterator, context)).hello
        if (why := too_long(theirs.router_id)) is not None:
            raise InvalidRequest(f"router_id {why}", field="router_id")
        changes = theirs.adapter_changes
        await self._cluster.adapters.learn(wire_routers.read_changes(changes), changes.forgotten)
        router = self._cluster.connect(theirs.router_id)
        try:
            # Nothing is awaited in between: changes from now on follow the hello, which has all before.
            settings, adapter_log = self._settings, self._cluster.adapters.log
            hello = wire_routers.scheduler_hello(settings.model, settings.time_scale, adapter_log)
            if self._cluster.core.draining:
                router.send(wire_routers.draining())
            # Before anything that may cancel it: gRPC sends no status where the first write was broken off.
            await self._cluster.awake.within(self._settings.scheduler.router_timeout_seconds, context.write(hello))
            await until_first_ends(
                self._read_router(request_iterator, router),
                self._write_router(context.write, router),
                router.until_overrun(),
                *([self._say_load(router)] if theirs.wants_load else []),
            )
        finally:
            self._cluster.disconnect(router)

    async def _write_router(self, write: Callable[[pb.RouteResponse], Awaitable[None]], router: RouterLink) -> None:
        """Write what gathers for a router, until a write lasts too long."""
        seconds = self._settings.scheduler.router_timeout_seconds
        writes: Writes[RouterLink] = Writes(self._cluster.awake, seconds)

        async def until_stuck() -> None:
            await writes.stuck()
            log.warning("router_too_slow", router_id=router.router_id, seconds=seconds)

        await until_first_ends(router.write_all(lambda message: writes.write(router, write(message))), until_stuck())

    async def _say_load(self, router: RouterLink) -> None:
        """Tell a router how much there is to do, whenever that has changed."""
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
                handles = request.cancel_handles_u32
                self._cluster.requests.cancel_all(router, u32.unpack(handles[: len(handles) // 4 * 4]))
            elif kind == "adapter_changes":
                changes = request.adapter_changes
                forgotten = changes.forgotten if changes.whole else None
                await self._cluster.adapters.learn(wire_routers.read_changes(changes), forgotten, router)

    async def _first(
        self, requests: AsyncIterator[_Request], context: grpc.aio.ServicerContext[_Request, _Response]
    ) -> _Request:
        """Return a stream's first message, which must be a hello and come soon."""
        try:
            first = await self._cluster.awake.within(HELLO_SECONDS, anext(requests, None))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_SECONDS:g} s")
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message must be hello", field="hello")
        return first

    def _submit(self, message: pb.Submit, router: RouterLink) -> None:
        """Take in a request; one that cannot be read is refused, and the stream goes on."""
        if message.handle in router.owned:  # whose refusal would end the request that has it
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

    # --- workers ----------------------------------------------------------------------------------------------------

    async def Attach(  # type: ignore[override]  # noqa: N802, D102
        self,
        request_iterator: AsyncIterator[pb.AttachRequest],
        context: grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse],
    ) -> None:
        await self._guard.check(context, WORKERS)
        hello = (await self._first(request_iterator, context)).hello
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
                self._read_worker(request_iterator, worker),
                worker.outbox.write_all(context.write),
                worker.until_given_up(),
                self._watch(worker),
            )
        finally:
            self._cluster.detach(worker)
        if worker.loss:
            raise WorkerGivenUp(worker.loss)

    async def GetDemand(  # noqa: N802, D102
        self,
        request: pb.GetDemandRequest,
        context: grpc.aio.ServicerContext[pb.GetDemandRequest, pb.GetDemandResponse],
    ) -> pb.GetDemandResponse:
        await self._guard.check(context, WORKERS)
        cluster = self._cluster
        return pb.GetDemandResponse(
            load=wire_routers.scheduler_load(cluster.load).load,
            first_to_leave=cluster.first_to_leave,
            draining=cluster.core.draining,
        )

    async def _read_worker(self, messages: AsyncIterator[pb.AttachRequest], worker: Dispatcher) -> None:
        async for message in messages:
            worker.heard()
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
        """Give a worker up that is silent, or has a plan and does not get on with it, for too long."""
        awake, watch = self._cluster.awake, worker.watch
        while (loss := watch.loss(awake.now())) is None:
            await awake.sleep_until(watch.due)
        limit = f"for {self._timeout_seconds:g} s (worker_timeout_seconds)"
        said = "nothing was heard of the worker" if loss is Loss.SILENT else "the worker made no progress with its plan"
        worker.give_up(loss, f"{said} {limit}")

    # --- prefix caches ----------------------------------------------------------------------------------------------

    async def WatchKvEvents(  # type: ignore[override]  # noqa: N802, D102
        self,
        request: pb.WatchKvEventsRequest,
        context: grpc.aio.ServicerContext[pb.WatchKvEventsRequest, pb.WatchKvEventsResponse],
    ) -> None:
        await self._guard.check(context, ROUTERS)
        if (why := too_long(request.worker_id)) is not None:
            raise InvalidRequest(f"worker_id {why}", field="worker_id")
        seconds = self._settings.scheduler.router_timeout_seconds
        writes: Writes[None] = Writes(self._cluster.awake, seconds)

        async def until_stuck() -> None:
            await writes.stuck()

        with self._cluster.kv_events.watched(request.worker_id) as watcher:
            await context.send_initial_metadata(())  # the first event may be long in coming
            await until_first_ends(
                watcher.write_all(lambda message: writes.write(None, context.write(message))),
                watcher.until_overrun(),
                until_stuck(),
            )
        raise Overloaded(
            f"KV events are read too slowly: one was not taken for {seconds:g} s"
            " (scheduler.router_timeout_seconds), or too many wait (scheduler.max_pending_router_tokens)",
            Reason.SLOW_READER,
        )

    # --- watchers ---------------------------------------------------------------------------------------------------

    async def WatchFrames(  # type: ignore[override]  # noqa: N802, D102
        self,
        request: pb.WatchFramesRequest,
        context: grpc.aio.ServicerContext[pb.WatchFramesRequest, pb.WatchFramesResponse],
    ) -> None:
        await self._guard.check(context, OPERATORS)
        frames = self._cluster.feed.frames(request.hz)
        try:
            async for frame in frames:
                await context.write(frame)
        finally:
            await frames.aclose()

    # --- operators --------------------------------------------------------------------------------------------------

    async def RegisterAdapter(  # noqa: N802, D102
        self,
        request: pb.RegisterAdapterRequest,
        context: grpc.aio.ServicerContext[pb.RegisterAdapterRequest, pb.RegisterAdapterResponse],
    ) -> pb.RegisterAdapterResponse:
        await self._guard.check(context, OPERATORS)
        adapter = request.adapter
        most = self._settings.adapters.max_lora_rank
        why = why_no_name(adapter.adapter_id)
        if why is None and adapter.adapter_id == self._settings.model:
            why = f"is {quoted(adapter.adapter_id)}, the base model's name"
        if why is not None:
            await status.abort(context, InvalidRequest(f"adapter_id {why}", field="adapter_id"))
        name = quoted(adapter.adapter_id)
        if adapter.rank < 1:
            message = f"adapter {name} has rank 0; it must be at least 1"
            await status.abort(context, InvalidRequest(message, field="rank", value=0, limit=1))
        if adapter.rank > most:
            message = f"adapter {name} has rank {adapter.rank}; max_lora_rank is {most}"
            await status.abort(context, RankOverLimit(message, field="rank", value=adapter.rank, limit=most))
        if adapter.version:
            change = AdapterChange(adapter.version, adapter.adapter_id, adapter.rank)
            await self._cluster.adapters.learn([change])
        else:
            try:
                await self._cluster.adapters.load(adapter.adapter_id, adapter.rank)
            except RequestError as error:
                await status.abort(context, error)
        known = self._cluster.core.adapters.get(adapter.adapter_id)
        return pb.RegisterAdapterResponse(adapter=None if known is None else wire.write_adapter(known))

    async def UnregisterAdapter(  # noqa: N802, D102
        self,
        request: pb.UnregisterAdapterRequest,
        context: grpc.aio.ServicerContext[pb.UnregisterAdapterRequest, pb.UnregisterAdapterResponse],
    ) -> pb.UnregisterAdapterResponse:
        await self._guard.check(context, OPERATORS)
        if (why := why_no_name(request.adapter_id)) is not None:
            raise InvalidRequest(f"adapter_id {why}", field="adapter_id")
        if request.version:
            await self._cluster.adapters.learn([AdapterChange(request.version, request.adapter_id, 0)])
        elif not await self._cluster.adapters.unload(request.adapter_id):
            name = quoted(request.adapter_id)
            message = f"adapter_id {name} is not known"
            await status.abort(context, UnknownName(message, field="adapter_id", value=name))
        latest = self._cluster.adapters.log.latest(request.adapter_id)
        return pb.UnregisterAdapterResponse(version=0 if latest is None else latest.version)

    async def SetClusterFaults(  # noqa: N802, D102
        self,
        request: pb.SetClusterFaultsRequest,
        context: grpc.aio.ServicerContext[pb.SetClusterFaultsRequest, pb.SetClusterFaultsResponse],
    ) -> pb.SetClusterFaultsResponse:
        await self._guard.check(context, OPERATORS)
        self._cluster.set_faults(request.rules, add=request.add)
        return pb.SetClusterFaultsResponse()

    async def ListClusterFaults(  # noqa: N802, D102
        self,
        request: pb.ListClusterFaultsRequest,
        context: grpc.aio.ServicerContext[pb.ListClusterFaultsRequest, pb.ListClusterFaultsResponse],
    ) -> pb.ListClusterFaultsResponse:
        await self._guard.check(context, OPERATORS)
        faults = self._cluster.faults
        return pb.ListClusterFaultsResponse(
            faults=[
                pb.ClusterFault(rule=fault.text, num_met=num_met, waits_for_worker=faults.waits_for_worker(fault))
                for fault, num_met in faults.rules
            ]
        )

    async def GetStatus(  # noqa: N802, D102
        self,
        request: pb.GetStatusRequest,
        context: grpc.aio.ServicerContext[pb.GetStatusRequest, pb.GetStatusResponse],
    ) -> pb.GetStatusResponse:
        await self._guard.check(context, OPERATORS)
        cluster = self._cluster
        return pb.GetStatusResponse(
            model=self._settings.model,
            time_scale=self._settings.time_scale,
            max_req_input_len=self._settings.scheduler.max_req_input_len,
            max_req_total_len=self._settings.scheduler.max_req_total_len,
            num_unplaced=cluster.core.num_unplaced,
            adapters=[wire.write_adapter(adapter) for adapter in cluster.core.adapters.values()],
            workers=[_worker_status(worker) for worker in cluster.workers.values()],
        )


def _heartbeats_too_rare(every_seconds: float, timeout_seconds: float) -> InvalidRequest:
    return InvalidRequest(
        f"the worker beats every {every_seconds:g} s; worker.heartbeat_seconds must be at most half of"
        f" scheduler.worker_timeout_seconds ({timeout_seconds:g})",
        field="worker.heartbeat_seconds",
        value=every_seconds,
        limit=timeout_seconds / 2,
    )


def _worker_status(worker: Dispatcher) -> types_pb2.Worker:
    state = types_pb2.WORKER_STATE_DRAINING if worker.draining else types_pb2.WORKER_STATE_READY
    return types_pb2.Worker(
        worker_id=worker.worker_id,
        state=state,
        gpu=worker.hello.gpu,
        model=worker.hello.model,
        tensor_parallel=worker.hello.tensor_parallel,
        num_running=worker.replica.num_running,
        num_waiting=worker.replica.num_waiting,
        kv_tokens=worker.replica.kv_tokens,
        max_total_token_num=worker.max_total_token_num,
        resident_adapters=sorted({adapter.adapter_id for adapter in worker.replica.resident_adapters.values()}),
        kv_events=worker.kv_source,
    )
