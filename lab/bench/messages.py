"""Cost that the chassis adds to a gRPC message: CPU with and without it, alternately.

    python -m lab.bench.messages

`CallGuard` reads each message that a server receives, and `Writes` wraps each that it writes. A client and a server in
one process send a stream of small messages in either direction; the difference of the process's CPU time with and
without is their cost, the median of pairs of rounds. This is close to the noise of a busy machine, so both are also
measured without gRPC: a message read, a write awaited.
"""

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import uvloop

from lorrery.chassis.awake import AwakeClock
from lorrery.chassis.calls import CallGuard
from lorrery.chassis.writes import Writes
from lorrery.v1 import scheduler_pb2 as pb

NUM_MESSAGES = 5_000
NUM_ROUNDS = 9
NUM_ALONE = 200_000
_PATH = "/bench.Messages/"
_MESSAGE = pb.RouteRequest(cancel_handles_u32=b"\x01\0\0\0" * 8)

Context = grpc.aio.ServicerContext[pb.RouteRequest, pb.RouteRequest]


async def _read_all(messages: AsyncIterator[pb.RouteRequest], context: Context) -> None:
    async for _ in messages:
        pass
    await context.write(_MESSAGE)


async def _write_plain(messages: AsyncIterator[pb.RouteRequest], context: Context) -> None:
    async for _ in messages:
        pass
    for _ in range(NUM_MESSAGES):
        await context.write(_MESSAGE)


async def _write_watched(messages: AsyncIterator[pb.RouteRequest], context: Context) -> None:
    writes: Writes[int] = Writes(AwakeClock(), 60.0)
    async for _ in messages:
        pass
    for _ in range(NUM_MESSAGES):
        await writes.write(1, context.write(_MESSAGE))


async def _server(interceptors: list[grpc.aio.ServerInterceptor]) -> tuple[grpc.aio.Server, grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=interceptors)
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(
            behaviour,
            request_deserializer=pb.RouteRequest.FromString,
            response_serializer=pb.RouteRequest.SerializeToString,
        )
        for name, behaviour in (("read", _read_all), ("plain", _write_plain), ("watched", _write_watched))
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Messages", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, grpc.aio.insecure_channel(f"127.0.0.1:{port}")


async def _cpu_us(channel: grpc.aio.Channel, method: str, num_sent: int) -> float:
    """Return the process's CPU per message of one stream, in microseconds."""
    call = channel.stream_stream(
        _PATH + method,
        request_serializer=pb.RouteRequest.SerializeToString,
        response_deserializer=pb.RouteRequest.FromString,
    )()
    began = time.process_time()
    for _ in range(num_sent):
        await call.write(_MESSAGE)
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass
    return (time.process_time() - began) / NUM_MESSAGES * 1e6


async def _difference(without: Callable[[], Awaitable[float]], with_it: Callable[[], Awaitable[float]]) -> str:
    plain: list[float] = []
    more: list[float] = []
    for number in range(2 * NUM_ROUNDS):
        first = number % 4 in (0, 3)  # each comes first equally often
        (plain if first else more).append(await (without if first else with_it)())
    differences = [b - a for a, b in zip(plain, more, strict=True)]
    quartiles = statistics.quantiles(differences, n=4)
    return (
        f"{statistics.median(plain):6.2f} us a message without, {statistics.median(differences):+.2f} us with it"
        f" (quartiles {quartiles[0]:+.2f} to {quartiles[2]:+.2f})"
    )


async def _reading_alone() -> str:
    plain: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        _read_all, request_deserializer=pb.RouteRequest.FromString
    )

    async def continuation(_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        return plain

    details = SimpleNamespace(method="bench", invocation_metadata=())
    guarded = await CallGuard().intercept_service(continuation, cast("grpc.HandlerCallDetails", details))
    assert guarded is not None
    data = _MESSAGE.SerializeToString()
    differences: list[float] = []
    for _ in range(NUM_ROUNDS):
        marks = [time.process_time()]
        for read in (plain.request_deserializer, guarded.request_deserializer):
            assert read is not None
            for _ in range(NUM_ALONE):
                read(data)
            marks.append(time.process_time())
        differences.append((marks[2] - 2 * marks[1] + marks[0]) / NUM_ALONE * 1e6)
    return f"{statistics.median(differences):+.2f} us a message"


async def _writing_alone() -> str:
    async def nothing() -> None:
        return

    async def plain() -> None:
        for _ in range(NUM_ALONE):
            await nothing()

    async def watched() -> None:
        writes: Writes[int] = Writes(AwakeClock(), 60.0)
        for _ in range(NUM_ALONE):
            await writes.write(1, nothing())

    differences: list[float] = []
    for _ in range(NUM_ROUNDS):
        marks = [time.process_time()]
        for act in (plain, watched):
            await act()
            marks.append(time.process_time())
        differences.append((marks[2] - 2 * marks[1] + marks[0]) / NUM_ALONE * 1e6)
    return f"{statistics.median(differences):+.2f} us a message"


async def measure() -> None:
    """Measure everything and print it."""
    plain_server, plain = await _server([])
    guarded_server, guarded = await _server([CallGuard()])
    for channel in (plain, guarded):
        await _cpu_us(channel, "read", NUM_MESSAGES)
    reading = await _difference(
        lambda: _cpu_us(plain, "read", NUM_MESSAGES), lambda: _cpu_us(guarded, "read", NUM_MESSAGES)
    )
    writing = await _difference(lambda: _cpu_us(plain, "plain", 1), lambda: _cpu_us(plain, "watched", 1))
    print(f"CallGuard, reading   {reading}")
    print(f"Writes, writing      {writing}")
    print(f"CallGuard alone      {await _reading_alone()}")
    print(f"Writes alone         {await _writing_alone()}")
    for channel in (plain, guarded):
        await channel.close()
    for server in (plain_server, guarded_server):
        await server.stop(None)


if __name__ == "__main__":
    uvloop.run(measure())
