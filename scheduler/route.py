"""One router's Route stream, from its hello to its end: receives requests and cancels, sends tokens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

from lorrery.scheduler import wire_routers
from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.core import refusals
from lorrery.scheduler.hello import first_message
from lorrery.scheduler.messages import Load
from lorrery.scheduler.routers import RouterLink
from lorrery.service.errors import InvalidRequest
from lorrery.service.names import quoted, too_long
from lorrery.service.network.calls import Writes
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import until_first_ends
from lorrery.service.telemetry.log import get_logger
from lorrery.v1 import scheduler_pb2 as pb

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
        theirs = (await first_message(requests, context, self._cluster.awake)).hello
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
            await self._cluster.awake.within(self._settings.scheduler.router_timeout_seconds, context.write(hello))
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
        writes: Writes[RouterLink] = Writes(self._cluster.awake, seconds)

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
