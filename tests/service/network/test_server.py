"""The gRPC server that all services share, under a burst of calls."""

import asyncio
from collections import Counter

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorrery.service.network.server import Health, bind, new_server
from lorrery.service.settings.sections import TlsSettings

NUM_CALLS = 2000  # as many as may wait; gRPC's own limit lets 1,000, and refuses at random above


async def test_a_call_of_an_unknown_method_is_answered_whatever_the_bytes_of_its_path():
    server, health = new_server(), Health()
    await health.attach(server, [])
    address = bind(server, "127.0.0.1:0", TlsSettings())
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            for path in ("/no.such/Method", b"/\xff\xfe"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(path)(b"", timeout=60)  # type: ignore[arg-type]
                assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
                await check(health_pb2.HealthCheckRequest(), timeout=60)
    finally:
        await server.stop(0)


async def test_a_burst_of_calls_is_answered_whole():
    server, health = new_server(), Health()
    await health.attach(server, [])
    address = bind(server, "127.0.0.1:0", TlsSettings())
    await server.start()

    def all_at_once() -> Counter[grpc.StatusCode]:
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            calls = [stub.Check.future(health_pb2.HealthCheckRequest()) for _ in range(NUM_CALLS)]
            return Counter(call.code() for call in calls)

    try:
        assert await asyncio.to_thread(all_at_once) == {grpc.StatusCode.OK: NUM_CALLS}
    finally:
        await server.stop(0)
