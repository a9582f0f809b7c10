"""Endless streams that are opened together, counted, and closed together.

Those of `grpc_streams` are not parsed, which would add the client's cost and slow it down.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self

import grpc.aio

from lab.bench.cluster import BenchBrokenError, endless_request
from lorrery.service.network.channel import open_channel
from lorrery.service.settings.sections import TlsSettings
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


class StreamCount:
    """Counter of the streams' events.

    Args:
        num_streams: number of streams to open.

    Attributes:
        events: messages of all streams.
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
