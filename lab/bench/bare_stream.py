"""Reference for the last hop: a gRPC server that only streams the same bytes repeatedly.

`python -m lab.bench.bare_stream` prints its address and serves until its standard input closes. A call carries its pace
as JSON: {"period_seconds": p, "message_bytes": n}. All streams of one pace are woken together at absolute deadlines,
like the tokens of a batch, and each writes one message of pre-serialised bytes: no protobuf, no look-up, no text.
Server and client use a service's gRPC options and event loop, so any cost of the router beyond this is its own.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import uvloop

from lab.bench.bare_process import serve_bytes, start_bare
from lorrery.service.network.channel import open_channel
from lorrery.service.settings.sections import TlsSettings

SERVICE, METHOD = "bench.BareStream", "Stream"


class _Ticker:
    """Counts periods, and wakes all tasks that wait for the next one."""

    def __init__(self, period_seconds: float) -> None:
        self.count = 0
        self.num_streams = 0
        self._period_seconds = period_seconds
        self._waiters: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.time() + period_seconds
        self._timer = self._loop.call_at(self._next, self._tick)

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    async def wait(self) -> None:
        """Return at the next tick."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _tick(self) -> None:
        self.count += 1
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        # As in a worker: lateness of up to one period is caught up, a longer stall is lost.
        self._next = max(self._next, self._loop.time() - self._period_seconds) + self._period_seconds
        self._timer = self._loop.call_at(self._next, self._tick)


class _Server:
    def __init__(self) -> None:
        self._tickers: dict[float, _Ticker] = {}

    async def stream(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        pace = json.loads(request)
        period_seconds, message = pace["period_seconds"], bytes(pace["message_bytes"])
        ticker = self._tickers.get(period_seconds)
        if ticker is None:
            ticker = self._tickers[period_seconds] = _Ticker(period_seconds)
        ticker.num_streams += 1
        try:
            num_sent = ticker.count
            while True:
                if num_sent == ticker.count:
                    await ticker.wait()
                num_sent += 1
                await context.write(message)
        finally:
            ticker.num_streams -= 1
            if not ticker.num_streams:
                ticker.close()
                del self._tickers[period_seconds]


class BareClient:
    """Opens bare streams; must be used in the loop that created it."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address, TlsSettings())
        self._stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            f"/{SERVICE}/{METHOD}"
        )

    async def receive(self, period_seconds: float, message_bytes: int, on_tokens: Callable[[int], None]) -> None:
        """Read one stream until cancelled; calls `on_tokens(1)` for each message."""
        pace = json.dumps({"period_seconds": period_seconds, "message_bytes": message_bytes})
        call = self._stream(pace.encode())
        try:
            async for _ in call:
                on_tokens(1)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the channel, after the streams."""
        await self._channel.close()


@contextlib.asynccontextmanager
async def bare_server() -> AsyncIterator[tuple[str, int]]:
    """Run the bare server in its own process; yield its address and pid."""
    async with start_bare("lab.bench.bare_stream") as started:
        yield started


async def serve() -> None:
    """Serve until standard input closes."""
    bare = _Server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        METHOD: grpc.unary_stream_rpc_method_handler(bare.stream),
    }
    await serve_bytes(SERVICE, handlers)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
