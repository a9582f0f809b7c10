"""Reference for a step: bare bidirectional gRPC streams that carry as many messages, of the same sizes.

`python -m lab.bench.bare_steps` is a process in one of three roles, given as JSON in its argument. A *sender* stands
for the worker: it periodically writes one message of pre-serialised bytes to its stream. A *relay* stands for the
scheduler: for each message from a sender it writes one to its reader (the benchmark itself stands for the router). The
third role only wakes periodically and does nothing: a lower bound for any service. gRPC options and event loop are
those of a service; there is no protobuf, no decision and no counting.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import uvloop

from lab.bench.bare_process import serve_bytes, start_bare
from lorrery.service.network.channel import open_channel
from lorrery.service.settings.sections import TlsSettings

SERVICE, SEND, READ = "bench.BareSteps", "Send", "Read"
Call = grpc.aio.StreamStreamCall[bytes, bytes]
_Context = grpc.aio.ServicerContext[bytes, bytes]


@contextlib.asynccontextmanager
async def bare_relay(message_bytes: int) -> AsyncIterator[tuple[str, int]]:
    """Run a relay that writes messages of `message_bytes`; yield its address and pid."""
    async with start_bare("lab.bench.bare_steps", json.dumps({"message_bytes": message_bytes})) as started:
        yield started


@contextlib.asynccontextmanager
async def bare_sender(address: str, period_seconds: float, message_bytes: int) -> AsyncIterator[int]:
    """Run a sender that writes to a relay; yield its pid."""
    part = {"address": address, "period_seconds": period_seconds, "message_bytes": message_bytes}
    async with start_bare("lab.bench.bare_steps", json.dumps(part)) as (_, pid):
        yield pid


@contextlib.asynccontextmanager
async def bare_wakes(period_seconds: float) -> AsyncIterator[int]:
    """Run a process that wakes periodically; yield its pid."""
    async with start_bare("lab.bench.bare_steps", json.dumps({"wake_seconds": period_seconds})) as (_, pid):
        yield pid


def stream(channel: grpc.aio.Channel, method: str) -> Call:
    """Open a stream of bytes."""
    call: Call = channel.stream_stream(f"/{SERVICE}/{method}")()
    return call


class _Relay:
    def __init__(self, message_bytes: int) -> None:
        self._message = bytes(message_bytes)
        self._num_waiting = 0
        self._wake = asyncio.Event()

    async def send(self, messages: AsyncIterator[bytes], _context: _Context) -> None:
        async for _ in messages:
            self._num_waiting += 1
            self._wake.set()

    async def read(self, _messages: AsyncIterator[bytes], context: _Context) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._num_waiting:
                self._num_waiting -= 1
                await context.write(self._message)


async def _relay(message_bytes: int) -> None:
    relay = _Relay(message_bytes)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        SEND: grpc.stream_stream_rpc_method_handler(relay.send),
        READ: grpc.stream_stream_rpc_method_handler(relay.read),
    }
    await serve_bytes(SERVICE, handlers)


async def _wake(wake_seconds: float) -> None:
    print("awake", flush=True)
    over = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    loop = asyncio.get_running_loop()
    due = loop.time()

    def wake() -> None:
        nonlocal due
        due = max(due + wake_seconds, loop.time())
        loop.call_at(due, wake)

    wake()
    await over


async def _send(address: str, period_seconds: float, message_bytes: int) -> None:
    channel = open_channel(address, TlsSettings())
    call, message = stream(channel, SEND), bytes(message_bytes)
    print(address, flush=True)
    over = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    loop = asyncio.get_running_loop()
    due = loop.time()
    while not over.done():
        due = max(due + period_seconds, loop.time())
        await asyncio.wait((over,), timeout=due - loop.time())
        await call.write(message)
    call.cancel()
    await channel.close()


def main(part: dict[str, Any]) -> None:
    """Run the given role."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if "wake_seconds" in part:
            runner.run(_wake(**part))
        else:
            runner.run(_send(**part) if "address" in part else _relay(**part))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
