"""RouterService: the gRPC edge, the engine ports, and the router as a process. `handler.py` has the operations."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import TypeVar

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from lorrery.router.access import ApiKey
from lorrery.router.edges import PROTOCOLS
from lorrery.router.edges.engines.engine import Engine
from lorrery.router.engine_metrics import EdgeEngine
from lorrery.router.generate import GrpcCall, abort_stream, begin_stream
from lorrery.router.handler import Handler
from lorrery.router.http.server import make_server
from lorrery.router.metrics import RouterMetrics
from lorrery.router.settings import EnginePort, Protocol
from lorrery.service.entry_point import NO_SCHEDULER_TO_COME, handled_by
from lorrery.service.errors import RequestError
from lorrery.service.installed import need_extra
from lorrery.service.network import status
from lorrery.service.network.calls import CallGuard
from lorrery.service.network.credentials import authorization, certificate_roles, warn_if_exposed
from lorrery.service.network.server import Health, bind, enable_reflection, new_server
from lorrery.service.process import STOP_GRACE_SECONDS
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.tracing import open_tracer
from lorrery.v1 import router_pb2, router_pb2_grpc


class EngineServer:
    """One engine port.

    Args:
        name: of its setting, also used in the announcement.
        handler: of the router.
        metrics: of the router.
        port: its settings.

    Raises:
        SettingsError: its protocol needs a package that is not installed.
    """

    def __init__(self, name: str, handler: Handler, metrics: RouterMetrics, port: EnginePort) -> None:
        self.name = name
        self.address = port.listen
        self._tls = handler.settings.server_tls
        self._guard = CallGuard()
        self._server = new_server(handler.receive_bytes, self._guard)
        self._health = Health()
        self._names = _register(name, port.protocol, Engine(handler, metrics, port), self._server)

    async def start(self) -> str:
        """Bind the address and start; return the address with the actual port.

        Raises:
            LorreryError: it cannot be bound.
        """
        await self._health.attach(self._server, self._names)
        enable_reflection(self._server, self._names)
        address = bind(self._server, self.address, self._tls, f"router.{self.name}")
        await self._server.start()
        self._guard.watch(int(address.rpartition(":")[2]))
        return address

    async def set_ready(self, ready: bool) -> None:
        """Set the health status."""
        await self._health.set(ready)

    async def end_health(self) -> None:
        """Report NOT_SERVING from now on."""
        await self._health.end()

    async def stop(self) -> None:
        """Stop, and end every open call."""
        await self._server.stop(STOP_GRACE_SECONDS)
        await self._guard.all_ended(STOP_GRACE_SECONDS)


def engine_servers(handler: Handler, metrics: RouterMetrics, ports: Mapping[str, EnginePort]) -> list[EngineServer]:
    """Return a server for each port. Raises SettingsError: see `EngineServer`."""
    return [EngineServer(name, handler, metrics, port) for name, port in ports.items()]


def _register(name: str, protocol: Protocol, engine: Engine, server: grpc.aio.Server) -> Sequence[str]:
    module, extra = PROTOCOLS[protocol]
    if extra is not None:
        need_extra(extra, f"router.{name}: the protocol {protocol}")
    names: Sequence[str] = import_module(module).register(engine, server)
    return names


GENERATE = f"{router_pb2.DESCRIPTOR.services_by_name['RouterService'].full_name}/Generate"

_Context = status.Context
_T = TypeVar("_T")


class Router(router_pb2_grpc.RouterServiceServicer):
    """The router as `service.process` runs it, and as gRPC's servicer.

    Raises:
        SettingsError: the tokenizer or the file of keys cannot be read.
    """

    name = "router"

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self._settings = settings
        metrics = RouterMetrics(registry, settings.metrics, EdgeEngine.of(settings))
        self.tracer = open_tracer(settings.tracing, self.name, registry)
        self._handler = Handler(settings, metrics, self.tracer)
        self._engines = engine_servers(self._handler, metrics, settings.router.engine_ports())
        self._http = (
            None if settings.router.http is None else make_server(self._handler, registry, settings.router.http)
        )

    # --- of every service ---

    @property
    def receive_bytes(self) -> int:
        """See `Service`."""
        return self._handler.receive_bytes

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicer to `server`."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)
        return (router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name,)

    async def listen(self) -> Mapping[str, str]:
        """See `Service`: HTTP, and the engine protocols."""
        addresses = {} if self._http is None else {"http": self._http.listen()}
        return addresses | {server.name: await server.start() for server in self._engines}

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Serve HTTP and keep the streams to the schedulers; ready once the first is up."""
        router = self._settings.router
        grpc_tls = self._settings.server_tls
        engines = [(f"router.{server.name}", server.address, grpc_tls) for server in self._engines]
        for setting, address, tls in (
            ("router.listen", router.listen, grpc_tls),
            ("router.http", router.http, self._settings.http_tls),
            *engines,
        ):
            if address is not None:
                warn_if_exposed(
                    setting,
                    address,
                    tls,
                    protected=self._handler.access.protects,
                    cure="set router.keys, or server_tls with ca",
                )

        async def set_all_ready(ready: bool) -> None:
            for server in self._engines:
                await server.set_ready(ready)
            await set_ready(ready)

        def expect_no_scheduler(_signal: signal.Signals) -> None:
            self._handler.expect_no_scheduler()

        try:
            with handled_by(asyncio.get_running_loop(), expect_no_scheduler, (NO_SCHEDULER_TO_COME,)):
                await self._serve(set_all_ready)
        finally:
            await asyncio.gather(*(server.stop() for server in self._engines))

    async def _serve(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._http is not None:
                tasks.create_task(self._http.run(), name="http")
            tasks.create_task(self._handler.run(set_ready), name="handler")

    async def drain(self) -> None:
        """Refuse new requests; return when the running ones have ended."""
        for server in self._engines:
            await server.end_health()
        await self._handler.drain()
        if self._http is not None:
            await self._http.answered()  # output of finished generations may still be unsent

    # --- the client's side ---

    async def Generate(  # type: ignore[override]  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: router_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Stream one request's output.

        A coroutine that calls `context.write`, unlike in the generated base class: a generator that is dropped between
        two messages would be closed only when the garbage collector finds it.
        """
        try:
            with self._handler.traces.grpc(context, GENERATE):
                await self._handler.generate(request, lambda: self._caller(context), GrpcCall(context))
        except RequestError as error:
            await abort_stream(context, error)

    def _caller(self, context: _Context) -> ApiKey:
        """Authenticate the caller; return its permissions.

        Raises:
            Unauthenticated: no valid key.
        """
        return self._handler.access.caller(authorization(context), certificate_roles(context))

    # --- adapters and status ---

    async def ListAdapters(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.ListAdaptersRequest, context: _Context
    ) -> router_pb2.ListAdaptersResponse:
        """List the adapters that any connected shard has and the caller may see."""
        return await self._answer(context, self._handler.list_adapters)

    async def LoadAdapter(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.LoadAdapterRequest, context: _Context
    ) -> router_pb2.LoadAdapterResponse:
        """Register an adapter at every shard."""
        await self._answer(context, lambda caller: self._handler.load_adapter(caller, request.adapter))
        return router_pb2.LoadAdapterResponse()

    async def UnloadAdapter(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.UnloadAdapterRequest, context: _Context
    ) -> router_pb2.UnloadAdapterResponse:
        """Unregister an adapter at every shard."""
        await self._answer(context, lambda caller: self._handler.unload_adapter(caller, request.adapter_id))
        return router_pb2.UnloadAdapterResponse()

    async def GetClusterStatus(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.GetClusterStatusRequest, context: _Context
    ) -> router_pb2.GetClusterStatusResponse:
        """Return the load of every shard, as far as the caller may see it."""
        return await self._answer(
            context, lambda caller: self._handler.cluster_status(caller, adapter_figures=request.adapter_figures)
        )

    async def WatchCluster(  # type: ignore[override]  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: router_pb2.WatchClusterRequest, context: _Context
    ) -> None:
        """Stream the state of every shard to an operator; a coroutine, as `Generate` is."""
        try:
            caller = self._caller(context)
            async with self._handler.watch_cluster(caller, request.hz) as watch:
                await begin_stream(context)
                while True:
                    await context.write(await watch.next())
                    self._handler.check_still_valid(caller)
        except RequestError as error:
            await abort_stream(context, error)

    # --- faults on request ---

    async def SetFaults(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.SetFaultsRequest, context: _Context
    ) -> router_pb2.SetFaultsResponse:
        """Set an operator's fault rules, replacing or adding to the previous ones."""
        rules, add = request.rules, request.add
        await self._answer(context, lambda caller: self._handler.set_faults(caller, rules, add=add))
        return router_pb2.SetFaultsResponse()

    async def ListFaults(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.ListFaultsRequest, context: _Context
    ) -> router_pb2.ListFaultsResponse:
        """List the fault rules of this router and its schedulers, with the number of times each has applied."""
        return await self._answer(context, self._handler.list_faults)

    async def _answer(self, context: _Context, answer: Callable[[ApiKey], Awaitable[_T]]) -> _T:
        """Serve an operator call; RequestErrors and a scheduler's errors become its status."""
        try:
            return await answer(self._caller(context))
        except RequestError as error:
            await status.abort(context, error)
        except grpc.aio.AioRpcError as error:
            await status.pass_on(context, error)
