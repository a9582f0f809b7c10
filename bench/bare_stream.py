"""The yardstick of the last hop: a gRPC server that streams the same bytes over and over, and does nothing else.

`python -m bench.bare_stream` prints its address and serves until its standard input closes. A call carries its pace as
JSON: {"period_seconds": p, "message_bytes": n}. All streams of one pace are woken together on absolute deadlines, as a
batch's tokens come, and each writes one message of pre-serialised bytes: no protobuf, no look-up, no text. Server and
client have the chassis's gRPC options and event loop, so what the router costs beyond this is the router's own. A call
of the other method is refused at once, which is the yardstick of a refusal.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop

from bench.cluster import BenchBrokenError
from lorrery.chassis.channel import open_channel
from lorrery.chassis.sections import TlsSettings
from lorrery.chassis.server import bind, new_server
from lorrery.local.processes import start_python

SERVICE, METHOD, REFUSE = "bench.BareStream", "Stream", "Refuse"
_ROOT = str(Path(__file__).parents[1])
_OPEN_SECONDS, _CLOSE_SECONDS = 30.0, 20.0


class _Ticker:
    """Counts a period after the other, and wakes everyone who waits for the next."""

    def __init__(self, period_seconds: float) -> None:
        self.count = 0
        self.num_streams = 0
        self._period_seconds = period_seconds
        self._waiters: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.time() + period_seconds
        self._timer = self._loop.call_at(self._next, self._tick)

    def close(self) -> None:
        """Stop."""
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
        # As a worker does: what is late is caught up with by one period, a longer stall is lost.
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

    async def refuse(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


class BareClient:
    """Opens bare streams; use it inside the loop that made it."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address, TlsSettings())
        self._stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            f"/{SERVICE}/{METHOD}"
        )

    async def receive(self, period_seconds: float, message_bytes: int, on_tokens: Callable[[int], None]) -> None:
        """Read one stream until cancelled; `on_tokens(1)` for each message."""
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
    """Run the bare server in a process of its own; yield its address and pid."""
    async with start_bare("bench.bare_stream") as started:
        yield started


@contextlib.asynccontextmanager
async def start_bare(module: str, *arguments: str) -> AsyncIterator[tuple[str, int]]:
    """Run a module in a process of its own until its standard input closes; yield what it prints first, and its pid."""
    pipe = asyncio.subprocess.PIPE
    # A service is started without the folder that it is started from; this one lies there.
    paths = os.pathsep.join(path for path in (_ROOT, os.environ.get("PYTHONPATH")) if path)
    process = await start_python(["-m", module, *arguments], stdin=pipe, stdout=pipe, variables={"PYTHONPATH": paths})
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_OPEN_SECONDS):
            line = await process.stdout.readline()
        if not line:
            raise BenchBrokenError(f"{module} did not start")
        yield line.decode().strip(), process.pid
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()


async def serve() -> None:
    """Serve until standard input closes."""
    server = new_server()
    bare = _Server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        METHOD: grpc.unary_stream_rpc_method_handler(bare.stream),
        REFUSE: grpc.unary_stream_rpc_method_handler(bare.refuse),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    address = bind(server, "127.0.0.1:0", TlsSettings())
    await server.start()
    print(address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(1.0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
