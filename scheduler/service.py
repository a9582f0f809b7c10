"""SchedulerService: the streams of routers and workers, and the calls of operators.

Only peers of its own cluster may call. With `cluster_token` set every call must carry the token; with `server_tls.ca`
set every certificate names a role, and the role must be one that may make this call. If both are set, both must hold;
if neither is, any peer may call. Refused calls are logged, at most one a second of a kind: a worker with a wrong token
dials for ever.
"""

import asyncio
import atexit
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NoReturn

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from lorrery.scheduler import wire, wire_routers
from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.streams import AttachStreams, RouteStreams
from lorrery.scheduler.workers import Dispatcher
from lorrery.service.errors import (
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    RankOverLimit,
    Reason,
    RequestError,
    Unauthenticated,
    UnknownName,
)
from lorrery.service.names import quoted, too_long, why_no_name
from lorrery.service.network import status
from lorrery.service.network.calls import Writes
from lorrery.service.network.credentials import (
    ClusterToken,
    Role,
    authorization,
    certificate_roles,
    token_of,
    warn_if_exposed,
)
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import until_first_ends
from lorrery.service.telemetry.log import BoundedLog, get_logger
from lorrery.service.telemetry.tracing import open_tracer
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc, types_pb2
from lorrery.vocabulary.adapters import AdapterChange, WhenKnown

ROUTERS = (Role.ROUTER,)
WORKERS = (Role.WORKER,)
OPERATORS = (Role.ROUTER, Role.OPERATOR)
"""A router passes on calls of its operators."""


class PeerAuthorization:
    """Checks calls.

    Args:
        settings: of the cluster.

    Raises:
        SettingsError: the token cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._token = ClusterToken(settings.cluster_token)
        self._roles_count = settings.server_tls.ca is not None
        self._refused = BoundedLog(get_logger("scheduler.guard"), "call_refused")

    @property
    def protects(self) -> bool:
        """Whether any call is restricted."""
        return self._token.required or self._roles_count

    async def check(self, context: status.Context, roles: tuple[Role, ...]) -> None:
        """End a forbidden call: UNAUTHENTICATED without the token, PERMISSION_DENIED with another role."""
        token = token_of(authorization(context))
        if self._token.required and not self._token.accepts(token):
            what = "the token sent is not this cluster's" if token else "the cluster's token is needed here"
            message = f"{what}; give this service the scheduler's file as cluster_token"
            await self._refuse(context, roles, Unauthenticated(message, field="cluster_token"))
        if self._roles_count and not certificate_roles(context) & set(roles):
            shown = ", ".join(sorted(certificate_roles(context))) or "none"
            message = (
                f"the certificate's role is {shown}; this call is for {' and '.join(roles)};"
                " `lorrery certs` makes certificates with roles"
            )
            await self._refuse(context, roles, PermissionDenied(message, field="client_tls.cert", value=shown))

    async def _refuse(self, context: status.Context, roles: tuple[Role, ...], error: RequestError) -> NoReturn:
        called_as = " or ".join(roles)
        kind = f"{called_as}: {error.reason.name}"
        self._refused.say(kind, called_as=called_as, peer=context.peer(), reason=str(error))
        await status.abort(context, error)


log = get_logger("scheduler")

_WHEN_KNOWN = {pb.WHEN_KNOWN_REFUSE: WhenKnown.REFUSE, pb.WHEN_KNOWN_REPLACE: WhenKnown.REPLACE}


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """A scheduler process."""

    name = "scheduler"

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._peers = PeerAuthorization(settings)
        self.tracer = open_tracer(settings.tracing, self.name, registry)
        self._cluster = Cluster(settings, registry, self.tracer)
        self._routes = RouteStreams(settings, self._cluster)
        self._attachments = AttachStreams(settings, self._cluster)

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
        """See `Service`: no further addresses."""
        return {}

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Report ready; the streams do the work, the last of it after this has ended."""
        if self._cluster.journal is not None:
            atexit.register(self._cluster.close_journal)
        warn_if_exposed(
            "scheduler.listen",
            self._settings.scheduler.listen,
            self._settings.server_tls,
            protected=self._peers.protects,
            cure="set cluster_token, or server_tls with ca",
        )
        await set_ready(True)
        try:
            await self._cluster.keep_journal()
            await asyncio.Event().wait()
        finally:
            self._cluster.begin_close()

    async def drain(self) -> None:
        """Refuse new requests; return when the last one has ended."""
        self._cluster.begin_drain()
        await self._cluster.requests.empty.wait()

    # --- streams ----------------------------------------------------------------------------------------------------

    async def Route(  # type: ignore[override]  # noqa: N802, D102  as the wire calls it; writes by itself
        self,
        request_iterator: AsyncIterator[pb.RouteRequest],
        context: grpc.aio.ServicerContext[pb.RouteRequest, pb.RouteResponse],
    ) -> None:
        await self._peers.check(context, ROUTERS)
        await self._routes.serve(request_iterator, context)

    async def Attach(  # type: ignore[override]  # noqa: N802, D102
        self,
        request_iterator: AsyncIterator[pb.AttachRequest],
        context: grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse],
    ) -> None:
        await self._peers.check(context, WORKERS)
        await self._attachments.serve(request_iterator, context)

    async def GetDemand(  # noqa: N802, D102
        self,
        request: pb.GetDemandRequest,
        context: grpc.aio.ServicerContext[pb.GetDemandRequest, pb.GetDemandResponse],
    ) -> pb.GetDemandResponse:
        await self._peers.check(context, WORKERS)
        cluster = self._cluster
        return pb.GetDemandResponse(
            load=wire_routers.scheduler_load(cluster.load).load,
            first_to_leave=cluster.first_to_leave,
            draining=cluster.core.draining,
        )

    # --- prefix caches ----------------------------------------------------------------------------------------------

    async def WatchKvEvents(  # type: ignore[override]  # noqa: N802, D102
        self,
        request: pb.WatchKvEventsRequest,
        context: grpc.aio.ServicerContext[pb.WatchKvEventsRequest, pb.WatchKvEventsResponse],
    ) -> None:
        await self._peers.check(context, ROUTERS)
        if (why := too_long(request.worker_id)) is not None:
            raise InvalidRequest(f"worker_id {why}", field="worker_id")
        seconds = self._settings.scheduler.router_timeout_seconds
        writes: Writes[None] = Writes(self._cluster.uptime, seconds)

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
        await self._peers.check(context, OPERATORS)
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
        await self._peers.check(context, OPERATORS)
        adapter = request.adapter
        most = self._settings.adapters.max_lora_rank
        why = why_no_name(adapter.adapter_id)
        if why is None and adapter.adapter_id in self._settings.model_names:
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
        try:
            if adapter.version:
                await self._cluster.adapters.load_weights(adapter.adapter_id)
            else:
                when_known = _WHEN_KNOWN.get(request.when_known, WhenKnown.KEEP)
                await self._cluster.adapters.load(adapter.adapter_id, adapter.rank, when_known)
        except RequestError as error:
            await status.abort(context, error)
        known = self._cluster.core.adapters.get(adapter.adapter_id)
        return pb.RegisterAdapterResponse(adapter=None if known is None else wire.write_adapter(known))

    async def UnregisterAdapter(  # noqa: N802, D102
        self,
        request: pb.UnregisterAdapterRequest,
        context: grpc.aio.ServicerContext[pb.UnregisterAdapterRequest, pb.UnregisterAdapterResponse],
    ) -> pb.UnregisterAdapterResponse:
        await self._peers.check(context, OPERATORS)
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

    async def ExpectNoWorker(  # noqa: N802, D102
        self,
        request: pb.ExpectNoWorkerRequest,
        context: grpc.aio.ServicerContext[pb.ExpectNoWorkerRequest, pb.ExpectNoWorkerResponse],
    ) -> pb.ExpectNoWorkerResponse:
        await self._peers.check(context, OPERATORS)
        self._cluster.expect_no_worker()
        return pb.ExpectNoWorkerResponse()

    async def SetClusterFaults(  # noqa: N802, D102
        self,
        request: pb.SetClusterFaultsRequest,
        context: grpc.aio.ServicerContext[pb.SetClusterFaultsRequest, pb.SetClusterFaultsResponse],
    ) -> pb.SetClusterFaultsResponse:
        await self._peers.check(context, OPERATORS)
        self._cluster.set_faults(request.rules, add=request.add)
        return pb.SetClusterFaultsResponse()

    async def ListClusterFaults(  # noqa: N802, D102
        self,
        request: pb.ListClusterFaultsRequest,
        context: grpc.aio.ServicerContext[pb.ListClusterFaultsRequest, pb.ListClusterFaultsResponse],
    ) -> pb.ListClusterFaultsResponse:
        await self._peers.check(context, OPERATORS)
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
        await self._peers.check(context, OPERATORS)
        cluster = self._cluster
        known, name = cluster.core.adapters, request.adapter_id
        adapters = [known[name]] if name in known else () if name or request.no_adapters else known.values()
        return pb.GetStatusResponse(
            model=self._settings.model,
            time_scale=self._settings.time_scale,
            max_req_input_len=self._settings.scheduler.max_req_input_len,
            max_req_total_len=self._settings.scheduler.max_req_total_len,
            num_unplaced=cluster.core.num_unplaced,
            adapters=[wire.write_adapter(adapter) for adapter in adapters],
            workers=() if name else [_worker_status(worker) for worker in cluster.workers.values()],
            adapter_figures=wire.write_figures(cluster.adapter_figures()) if request.adapter_figures else None,
        )


def _worker_status(worker: Dispatcher) -> types_pb2.Worker:
    state = types_pb2.WORKER_STATE_DRAINING if worker.member.draining else types_pb2.WORKER_STATE_READY
    return types_pb2.Worker(
        worker_id=worker.worker_id,
        state=state,
        gpu=worker.hello.gpu,
        model=worker.hello.model,
        tensor_parallel=worker.hello.tensor_parallel,
        num_running=worker.replica.num_running,
        num_waiting=worker.replica.num_waiting,
        kv_tokens=worker.replica.kv_tokens,
        max_total_token_num=worker.member.pool_tokens,
        resident_adapters=sorted({adapter.adapter_id for adapter in worker.replica.resident_adapters.values()}),
        kv_events=worker.kv_source,
    )
