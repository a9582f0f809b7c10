"""The gRPC client: sends one request, and records the time and content of each message.

At most `MAX_STREAMS_PER_CHANNEL` streams share a connection (1,500 on one were fine, with 2,000 some were cancelled by
neither side), so channels are added as needed. Every call is cancelled in `finally`: this grpcio never cancels a call
that was merely dropped.
"""

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from lorrery.loadgen.reception import NO_FINISH, Ask, ClusterView, Reception, Send
from lorrery.loadgen.wire import (
    GenerateRequest,
    GenerateResponse,
    GetClusterStatusRequest,
    ListAdaptersRequest,
    adapter_figures,
    cluster_view,
    finish_view,
    generate_request,
)
from lorrery.loadgen.workload.outcome import OK
from lorrery.service.errors import LorreryError
from lorrery.service.network.channel import open_channel, why_silent
from lorrery.service.network.credentials import bearer
from lorrery.service.settings.sections import TlsSettings
from lorrery.v1 import router_pb2_grpc
from lorrery.vocabulary import u32
from lorrery.vocabulary.adapters import FiguresByAdapter

MAX_STREAMS_PER_CHANNEL = 500
_POLL_SECONDS = 0.2


@dataclass(slots=True)
class _Connection:
    channel: grpc.aio.Channel
    stub: "router_pb2_grpc.RouterServiceAsyncStub"  # known to type checkers only
    num_streams: int = 0


class RouterClient:
    """A client of one router; open it with `async with` inside the loop that uses it.

    Args:
        target: HOST:PORT or any gRPC target.
        tls: the client's side of TLS; empty: plain text.
        api_key: sent with every call; empty: none.
    """

    tells_true_length = True

    def __init__(self, target: str, tls: TlsSettings, api_key: str = "") -> None:
        self.target = target
        self._tls = tls
        self._metadata = bearer(api_key) if api_key else ()
        self._connections: list[_Connection] = []

    async def __aenter__(self) -> Self:
        self._connections.append(self._connect())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            await connection.channel.close()
        self._connections.clear()

    async def cluster(self, timeout_seconds: float) -> ClusterView:
        """Read the cluster's status, waiting until the router answers and a shard is connected.

        Raises:
            LorreryError: that did not happen in time.
        """
        deadline = time.monotonic() + timeout_seconds
        why, answered = "no scheduler is connected to it", False
        while (left := deadline - time.monotonic()) > 0:
            call = self._connections[0].stub.GetClusterStatus(
                GetClusterStatusRequest(), timeout=left, wait_for_ready=True, metadata=self._metadata
            )
            try:
                view = cluster_view(await call)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise LorreryError(f"{self.target}: {error.code().name}: {error.details()}") from None
                if not answered:  # else the last call merely had little time left
                    channel = self._connections[0].channel
                    why = await why_silent(self.target, channel, "--protocol openai for an HTTP server")
                break
            finally:
                call.cancel()
            if view is not None:
                return view
            answered = True
            await asyncio.sleep(min(_POLL_SECONDS, max(deadline - time.monotonic(), 0.0)))
        raise LorreryError(f"no cluster at {self.target} within {timeout_seconds:g} s: {why}")

    async def adapters(self, timeout_seconds: float) -> list[str]:
        """List the ids of the adapters that requests may name, in the router's order.

        Raises:
            LorreryError: the router does not list them.
        """
        call = self._connections[0].stub.ListAdapters(
            ListAdaptersRequest(), timeout=timeout_seconds, metadata=self._metadata
        )
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise LorreryError(f"{self.target}: ListAdapters: {error.code().name}: {error.details()}") from None
        finally:
            call.cancel()
        return [adapter.adapter_id for adapter in response.adapters]

    async def adapter_figures(self, timeout_seconds: float) -> list[FiguresByAdapter] | None:
        """Read each scheduler's figures of adapters; None: one does not give them, or not to this caller."""
        call = self._connections[0].stub.GetClusterStatus(
            GetClusterStatusRequest(adapter_figures=True), timeout=timeout_seconds, metadata=self._metadata
        )
        try:
            return adapter_figures(await call)
        except grpc.aio.AioRpcError:
            return None
        finally:
            call.cancel()

    def prepare(self, ask: Ask) -> Send:
        """See `Client.prepare`."""
        message = generate_request(ask)

        async def send(reception: Reception, on_tokens: Callable[[int], None]) -> None:
            await self.receive(message, reception, timeout_seconds=ask.timeout_seconds, on_tokens=on_tokens)

        return send

    async def receive(
        self,
        request: GenerateRequest,
        reception: Reception,
        *,
        timeout_seconds: float,
        on_tokens: Callable[[int], None],
    ) -> None:
        """Send a request and record its stream in `reception`; a failed stream is recorded, not raised.

        Args:
            request: to send.
            reception: a new one.
            timeout_seconds: the call's deadline, wall time.
            on_tokens: called with the number of tokens of each message.
        """
        connection = self._least_used()
        connection.num_streams += 1
        call = connection.stub.Generate(request, timeout=timeout_seconds, metadata=self._metadata)
        try:
            async for response in call:
                _note(response, reception, on_tokens)
            reception.status = OK if reception.finish is not None else NO_FINISH
        except grpc.aio.AioRpcError as error:
            reception.status = error.code().name
            reception.detail = error.details() or ""
        finally:
            call.cancel()
            connection.num_streams -= 1

    def _connect(self) -> _Connection:
        # Without its own pool a second channel would share the first one's connection.
        channel = open_channel(self.target, self._tls, options=(("grpc.use_local_subchannel_pool", 1),))
        return _Connection(channel, router_pb2_grpc.RouterServiceStub(channel))

    def _least_used(self) -> _Connection:
        connection = min(self._connections, key=lambda candidate: candidate.num_streams)
        if connection.num_streams >= MAX_STREAMS_PER_CHANNEL:
            connection = self._connect()
            self._connections.append(connection)
        return connection


def _note(response: GenerateResponse, reception: Reception, on_tokens: Callable[[int], None]) -> None:
    num_tokens = len(response.token_ids)
    if num_tokens:
        reception.note(num_tokens)
        reception.crc32 = zlib.crc32(u32.pack(response.token_ids), reception.crc32 or 0)
        if reception.keeps_output:
            reception.token_ids.extend(response.token_ids)
        on_tokens(num_tokens)
    if response.HasField("finish"):
        reception.finish = finish_view(response.finish)
