"""Endless streams from a router or another server, over gRPC and over HTTP, whose messages are counted but not parsed.

Parsing them would add the client's cost and slow it down.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self, cast

import grpc.aio

from lab.bench.cluster import BenchBrokenError, endless_request
from lab.bench.mock_servers import Target
from lorrery.chassis.channel import open_channel
from lorrery.chassis.sections import TlsSettings
from lorrery.local.cluster import LocalCluster
from lorrery.v1 import router_pb2

POOL_TOKENS = 400_000
"""Tokens of prompts and outputs of all streams together; slightly less than the GPU's pool."""
PROMPT_TOKENS = 16
OPEN_SECONDS = 60.0
_STREAMS_PER_CONNECTION = 500
_GENERATE = "/lorrery.v1.RouterService/Generate"


def endless_tokens(num_streams: int) -> int:
    """Return the number of tokens that each of `num_streams` concurrent streams may have."""
    return POOL_TOKENS // num_streams - PROMPT_TOKENS


def our_target(cluster: LocalCluster, num_streams: int) -> Target:
    """Return a cluster's HTTP edge as a target with a request for an endless stream."""
    body = {
        "prompt": list(range(1, PROMPT_TOKENS + 1)),
        "max_tokens": endless_tokens(num_streams),
        "ignore_eos": True,
        "stream": True,
    }
    roots = [process.pid for process in cluster.processes.values()]
    return Target(cluster.http_address, "/v1/completions", body, roots)


class StreamCount:
    """Counter of the streams' events.

    Args:
        num_streams: number of streams to open.

    Attributes:
        events: of all streams.
        failure: first error of a stream.
    """

    def __init__(self, num_streams: int) -> None:
        self.events = 0
        self.failure = ""
        self._num_streams = self._missing = num_streams
        self._decided = asyncio.Event()

    def began(self) -> None:
        """Record that another stream has yielded its first event."""
        self._missing -= 1
        if not self._missing:
            self._decided.set()

    def failed(self, why: str) -> None:
        """Record that a stream failed; only the first failure is kept."""
        self.failure = self.failure or why
        self._decided.set()

    async def all_began(self) -> None:
        """Wait until every stream has yielded an event.

        Raises:
            BenchBrokenError: a stream failed, or they took too long.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_SECONDS):
                await self._decided.wait()
        if self._missing or self.failure:
            raise BenchBrokenError(self.failure or f"{self._missing} streams did not begin in {OPEN_SECONDS:g} s")

    @contextlib.asynccontextmanager
    async def opened(self, stream: Callable[[int], Coroutine[Any, Any, None]]) -> AsyncIterator[Self]:
        """Run `stream(number)` for each stream until exit; entered once every stream has yielded an event."""
        tasks = [asyncio.create_task(stream(number)) for number in range(self._num_streams)]
        try:
            await self.all_began()
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def grpc_streams(address: str, num_streams: int, num_in_all: int | None = None) -> AsyncIterator[StreamCount]:
    """Open endless streams of a router over gRPC; `num_in_all` includes the streams of other routers."""
    count = StreamCount(num_streams)
    max_tokens = endless_tokens(num_in_all or num_streams)
    channels = [
        # Without its own pool a second channel would share the first one's connection.
        open_channel(address, TlsSettings(), options=(("grpc.use_local_subchannel_pool", 1),))
        for _ in range(0, num_streams, _STREAMS_PER_CONNECTION)
    ]
    # Generate's responses stay bytes.
    methods: list[Any] = [
        channel.unary_stream(_GENERATE, request_serializer=router_pb2.GenerateRequest.SerializeToString)
        for channel in channels
    ]

    async def stream(number: int) -> None:
        call = methods[number % len(methods)](endless_request(f"stream-{number}", PROMPT_TOKENS, max_tokens))
        try:
            await call.read()
            count.began()
            while await call.read() is not grpc.aio.EOF:
                count.events += 1
            count.failed("a stream ended")
        except grpc.aio.AioRpcError as error:
            count.failed(str(error.details()))
        finally:
            call.cancel()

    try:
        async with count.opened(stream):
            yield count
    finally:
        for channel in channels:
            await channel.close()


class StreamEvents(asyncio.Protocol):
    """Sends one request and counts the events of its response, each terminated by two line feeds."""

    def __init__(self, request: bytes, count: StreamCount) -> None:
        self._request = request
        self._count = count
        self._last = b""
        self._begun = self._closing = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the events that end in these bytes."""
        if not self._begun:
            if b" 200 " not in data[:20]:
                self._count.failed(data[:300].decode(errors="replace"))
            self._begun = True
            self._count.began()
        self._count.events += (self._last + data).count(b"\n\n")
        self._last = data[-1:] if data.endswith(b"\n") and not data.endswith(b"\n\n") else b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Record an end that this side did not cause."""
        if not self._closing:
            self._count.failed(f"a stream ended: {exc}")

    def close(self) -> None:
        """End the stream at once."""
        self._closing = True
        if self.transport is not None:
            self.transport.abort()


@contextlib.asynccontextmanager
async def sse_streams(target: Target, num_streams: int) -> AsyncIterator[StreamCount]:
    """Open endless streams over HTTP, each on its own connection."""
    body = json.dumps(target.body).encode()
    head = f"POST {target.path} HTTP/1.1\r\nhost: {target.address}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    host, _, port = target.address.rpartition(":")
    count = StreamCount(num_streams)
    loop = asyncio.get_running_loop()
    streams: list[StreamEvents] = []
    try:
        for _ in range(num_streams):
            _, stream = await loop.create_connection(lambda: StreamEvents(request, count), host, int(port))
            streams.append(stream)
        await count.all_began()
        yield count
    finally:
        for stream in streams:
            stream.close()
