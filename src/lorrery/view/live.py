"""The feed of a running cluster, as a client of one router."""

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from lorrery.service.errors import LorreryError
from lorrery.service.installed import VERSION
from lorrery.service.network.channel import open_channel, why_silent
from lorrery.service.network.credentials import bearer
from lorrery.service.settings.sections import TlsSettings
from lorrery.v1 import router_pb2, router_pb2_grpc
from lorrery.view.frame import USUAL_HZ, Frame, Hello
from lorrery.view.wire import Joiner

ANSWER_SECONDS = 5.0
"""Timeout of the router's answer, in wall seconds."""
PLAIN = TlsSettings()
_POLL_SECONDS = 0.2


class LiveFeed:
    """See `Feed`; open it with `async with` in the loop that uses it.

    Args:
        target: HOST:PORT of the router, or any gRPC target.
        tls: the client's side of TLS; empty means plain text.
        api_key: an operator's, sent with every call; empty: none.
    """

    def __init__(self, target: str, tls: TlsSettings = PLAIN, api_key: str = "") -> None:
        self._target = target
        self._tls = tls
        self._metadata = bearer(api_key) if api_key else ()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._target, self._tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def hello(self) -> Hello:
        """Return the hello of the cluster as soon as one of its schedulers is connected.

        Raises:
            LorreryError: the router does not answer, refuses this key, or has no scheduler.
        """
        answered = False
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while True:
                    shard = _first_connected(await self._status())
                    answered = True
                    if shard is not None:
                        break
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            why = "no scheduler is connected to it" if answered else await why_silent(self._target, self._opened())
            raise LorreryError(f"no cluster at {self._target} within {ANSWER_SECONDS:g} s: {why}") from None
        return Hello("live", shard.model, f"{shard.model} at {self._target}", VERSION, time_scale=shard.time_scale)

    async def frames(self, hz: float = USUAL_HZ) -> AsyncGenerator[Frame]:
        """See `Feed.frames`."""
        call = self._stub().WatchCluster(
            router_pb2.WatchClusterRequest(hz=hz), metadata=self._metadata, wait_for_ready=True
        )
        joiner = Joiner()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                message = await call.read()
            while isinstance(message, router_pb2.WatchClusterResponse):
                frame = joiner.frame(message)
                if frame is not None:
                    yield frame
                message = await call.read()
        except TimeoutError:
            raise LorreryError(f"no cluster at {self._target} within {ANSWER_SECONDS:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    async def _status(self) -> router_pb2.GetClusterStatusResponse:
        call = self._stub().GetClusterStatus(
            router_pb2.GetClusterStatusRequest(), wait_for_ready=True, metadata=self._metadata
        )
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    def _stub(self) -> "router_pb2_grpc.RouterServiceAsyncStub":  # known to type checkers only
        return router_pb2_grpc.RouterServiceStub(self._opened())

    def _opened(self) -> grpc.aio.Channel:
        assert self._channel is not None, "open it with async with"
        return self._channel

    def _error(self, error: grpc.aio.AioRpcError) -> LorreryError:
        return LorreryError(f"{self._target}: {error.code().name}: {error.details()}")


def _first_connected(status: router_pb2.GetClusterStatusResponse) -> router_pb2.Shard | None:
    return next((shard for shard in status.shards if shard.connected and shard.time_scale > 0), None)
