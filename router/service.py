"""RouterService: what clients call. What `Generate` does for one request is in `generate.py`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from lorrery.chassis import status
from lorrery.chassis.credentials import authorization, certificate_roles
from lorrery.chassis.errors import (
    InjectedFault,
    Internal,
    Overloaded,
    Reason,
    RequestError,
    Unattainable,
    Unavailable,
)
from lorrery.chassis.exposure import warn_if_exposed
from lorrery.chassis.log import get_logger
from lorrery.router import adapters, cluster_faults
from lorrery.router.access import Access, check_load, check_operator, visible_adapters, visible_status
from lorrery.router.checks import receive_bytes
from lorrery.router.faults import Injector
from lorrery.router.generate import Generation
from lorrery.router.keys import ApiKey
from lorrery.router.metrics import RouterMetrics
from lorrery.router.placement import Placement
from lorrery.router.reader import RequestReader
from lorrery.router.tokenizer import open_tokenizer
from lorrery.settings import Settings
from lorrery.v1 import router_pb2, router_pb2_grpc

# How long a handler waits until a reader that was too slow has heard of it.
FAREWELL_SECONDS = 5.0

_OUTCOMES: dict[grpc.StatusCode, str] = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.NOT_FOUND: "not_found",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded",
    grpc.StatusCode.FAILED_PRECONDITION: "rank_over_limit",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.PERMISSION_DENIED: "denied",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
}

_Context = status.Context
_T = TypeVar("_T")
_log = get_logger("router.service")


class Router(router_pb2_grpc.RouterServiceServicer):
    """The router as the chassis's `Service`, and as gRPC's servicer.

    Raises:
        SettingsError: the tokenizer or the file of keys cannot be read.
    """

    name = "router"

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._access = Access(settings)
        self._tokenizer = open_tokenizer(settings.router.tokenizer)
        self._metrics = RouterMetrics(registry)
        self._placement = Placement(settings, self._metrics)
        self._cluster_status = adapters.ClusterStatus(self._placement)
        self._injector = Injector(settings, self._metrics)
        self._generation = Generation(
            self._access,
            RequestReader(settings, self._tokenizer, self._access),
            self._tokenizer,
            self._placement,
            self._injector,
            self._metrics,
            settings.router.reader_timeout_seconds,
        )
        self._open_handlers = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._metrics.watch(
            open_handlers=lambda: self._open_handlers,
            in_flight=lambda: self._placement.num_in_flight,
            waiting=lambda: self._placement.num_waiting,
        )

    # --- the chassis's side ---

    @property
    def receive_bytes(self) -> int:
        """See `Service`; it follows from the longest prompt."""
        longest_token_bytes = self._tokenizer.longest_token_bytes
        max_req_input_len = self._settings.scheduler.max_req_input_len
        return receive_bytes(max_req_input_len, longest_token_bytes, self._settings.router.max_stop_bytes)

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicer to `server`."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)
        return (router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name,)

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Keep the streams to the schedulers; ready once the first is up."""
        warn_if_exposed(
            "router.listen",
            self._settings.router.listen,
            self._settings.server_tls,
            protected=self._access.protects,
            cure="set router.keys, or server_tls with ca",
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._placement.run(), name="placement")
            tasks.create_task(self._generation.cut_stuck_readers(), name="stuck readers")
            await self._placement.any_connected.wait()
            self._injector.begin()
            await set_ready(True)

    async def drain(self) -> None:
        """Refuse new requests; return when the running ones have ended."""
        self._draining = True
        await self._idle.wait()

    # --- the client's side ---

    async def Generate(  # type: ignore[override]  # noqa: N802  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: router_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Stream one request's output.

        Writes with `context.write` and so is a coroutine, which the generated base class does not know of: a generator
        that is dropped between two messages would be closed only when the garbage collector finds it.
        """
        outcome = "failed"
        self._open_handlers += 1
        self._idle.clear()
        try:
            caller = self._caller(context)
            self._check_open()
            await self._generation.stream(request, caller, context)
            outcome = "ok"
        except asyncio.CancelledError:
            remaining = context.time_remaining()
            outcome = "deadline" if remaining is not None and remaining <= 0 else "cancelled"
            raise
        except RequestError as error:
            outcome = _outcome(error)
            await _abort(context, error)
        except Exception as error:
            _log.exception("generate_failed", request_id=request.request_id)
            await _abort(context, Internal(str(error)))
        finally:
            self._metrics.request_ended(outcome)
            self._open_handlers -= 1
            if not self._open_handlers:
                self._idle.set()

    def _check_open(self) -> None:
        """Check that there is room for one more request, which is counted already.

        Raises:
            RequestError: there is none.
        """
        if self._draining:
            raise Unavailable("the router is draining; ask another", Reason.DRAINING)
        if self._open_handlers > (limit := self._settings.router.max_open_requests):
            raise Overloaded(
                f"{limit} requests are open; max_open_requests is {limit}; try later",
                Reason.TOO_MANY_OPEN_REQUESTS,
                field="max_open_requests",
                limit=limit,
            )

    def _caller(self, context: _Context) -> ApiKey:
        """Return what a caller may do.

        Raises:
            Unauthenticated: no valid key.
        """
        return self._access.caller(authorization(context), certificate_roles(context))

    # --- adapters and status ---

    async def ListAdapters(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.ListAdaptersRequest, context: _Context
    ) -> router_pb2.ListAdaptersResponse:
        """List the adapters that any connected shard knows, and the caller may know of."""

        async def answer() -> router_pb2.ListAdaptersResponse:
            caller = self._caller(context)
            known = await adapters.list_adapters(self._placement, self._settings.model)
            return router_pb2.ListAdaptersResponse(adapters=visible_adapters(caller, known.adapters), model=known.model)

        return await _answer(context, answer())

    async def LoadAdapter(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.LoadAdapterRequest, context: _Context
    ) -> router_pb2.LoadAdapterResponse:
        """Make an adapter known to every shard."""

        async def answer() -> router_pb2.LoadAdapterResponse:
            check_load(self._caller(context), request.adapter.adapter_id)
            max_lora_rank = self._settings.adapters.max_lora_rank
            await adapters.load(self._placement, request.adapter, max_lora_rank, self._settings.model)
            return router_pb2.LoadAdapterResponse()

        return await _answer(context, answer())

    async def UnloadAdapter(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.UnloadAdapterRequest, context: _Context
    ) -> router_pb2.UnloadAdapterResponse:
        """Make an adapter unknown to every shard."""

        async def answer() -> router_pb2.UnloadAdapterResponse:
            check_load(self._caller(context), request.adapter_id)
            await adapters.unload(self._placement, request.adapter_id, self._settings.model)
            return router_pb2.UnloadAdapterResponse()

        return await _answer(context, answer())

    async def GetClusterStatus(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.GetClusterStatusRequest, context: _Context
    ) -> router_pb2.GetClusterStatusResponse:
        """Tell how full every shard is, as far as the caller may know."""

        async def answer() -> router_pb2.GetClusterStatusResponse:
            caller = self._caller(context)
            return visible_status(caller, await self._cluster_status.get())

        return await _answer(context, answer())

    # --- faults on request ---

    async def SetFaults(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.SetFaultsRequest, context: _Context
    ) -> router_pb2.SetFaultsResponse:
        """Take an operator's rules in place of the last ones."""

        async def answer() -> router_pb2.SetFaultsResponse:
            check_operator(self._caller(context), "set faults")
            await cluster_faults.set_faults(self._placement, self._injector, request.rules)
            return router_pb2.SetFaultsResponse()

        return await _answer(context, answer())

    async def ListFaults(  # noqa: N802  gRPC's name for it
        self, request: router_pb2.ListFaultsRequest, context: _Context
    ) -> router_pb2.ListFaultsResponse:
        """List the rules of this router and its schedulers, and how often each has happened."""

        async def answer() -> router_pb2.ListFaultsResponse:
            check_operator(self._caller(context), "list faults")
            return await cluster_faults.list_faults(self._placement, self._injector)

        return await _answer(context, answer())


async def _answer(context: _Context, answer: Awaitable[_T]) -> _T:
    """Await an operator call's answer; ours and a scheduler's errors become the status."""
    try:
        return await answer
    except RequestError as error:
        await status.abort(context, error)
    except grpc.aio.AioRpcError as error:
        await status.pass_on(context, error)


async def _abort(context: _Context, error: RequestError) -> None:
    """End a stream with an error's status. Never returns normally.

    To a reader that has stopped reading, the status waits behind what it has not read. After a while we no longer do;
    gRPC keeps the status for it.
    """
    message = "internal error; the router's log has more" if error.reason is Reason.INTERNAL else None
    try:
        async with asyncio.timeout(FAREWELL_SECONDS):
            await status.abort(context, error, message)
    except TimeoutError:
        raise asyncio.CancelledError from None


def _outcome(error: RequestError) -> str:
    if isinstance(error, Unattainable):
        return "unattainable"
    if isinstance(error, InjectedFault):
        return "fault"
    return _OUTCOMES.get(status.grpc_status(error), "failed")
