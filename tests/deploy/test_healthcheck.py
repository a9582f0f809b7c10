"""The container's health check, against a real health server and against things that are none."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.deploy.probes import SCRIPT
from tests.deploy.probes import healthcheck as run

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


healthcheck = _load()


@pytest.fixture
async def servicer_and_address() -> AsyncIterator[tuple[health.aio.HealthServicer, str]]:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_serving_server_is_healthy(servicer_and_address: tuple[health.aio.HealthServicer, str]) -> None:
    servicer, address = servicer_and_address
    await servicer.set("", SERVING)
    assert await run(address) == (0, "")


async def test_a_named_service_is_asked_by_its_name(
    servicer_and_address: tuple[health.aio.HealthServicer, str],
) -> None:
    servicer, address = servicer_and_address
    await servicer.set("", NOT_SERVING)
    await servicer.set("lorrery.v1.RouterService", SERVING)
    assert (await run(address, "lorrery.v1.RouterService"))[0] == 0


async def test_a_server_that_does_not_serve_is_unhealthy(
    servicer_and_address: tuple[health.aio.HealthServicer, str],
) -> None:
    servicer, address = servicer_and_address
    await servicer.set("", NOT_SERVING)
    code, output = await run(address)
    assert code == 1
    assert "NOT_SERVING" in output


async def test_a_graceful_shutdown_is_unhealthy(servicer_and_address: tuple[health.aio.HealthServicer, str]) -> None:
    servicer, address = servicer_and_address
    await servicer.set("", SERVING)
    await servicer.enter_graceful_shutdown()
    assert (await run(address))[0] == 1


async def test_an_unknown_service_is_unhealthy(servicer_and_address: tuple[health.aio.HealthServicer, str]) -> None:
    _, address = servicer_and_address
    code, output = await run(address, "no.such.Service")
    assert code == 1
    assert "no.such.Service" in output


async def test_a_refused_port_is_unhealthy() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    code, output = await run(f"127.0.0.1:{port}")
    assert code == 1
    assert "refused" in output


async def _http1(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(24)
    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(-1)
    writer.close()


async def _closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(24)
    writer.close()


async def _padded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer SERVING after a ping, with padding and the message cut in two."""
    await reader.read(24)
    message = b"\0\0\0\0\2\x08\x01"
    writer.write(
        healthcheck.frame(healthcheck.SETTINGS, 0, 0)
        + healthcheck.frame(healthcheck.PING, 0, 0, bytes(8))
        + healthcheck.frame(healthcheck.HEADERS, healthcheck.END_HEADERS, 1, b"\x88")
        + healthcheck.frame(healthcheck.DATA, healthcheck.PADDED, 1, b"\x03" + message[:4] + bytes(3))
        + healthcheck.frame(healthcheck.DATA, 0, 1, message[4:])
        + healthcheck.frame(healthcheck.HEADERS, healthcheck.END_HEADERS | healthcheck.END_STREAM, 1, b"\x88")
    )
    await reader.read(-1)
    writer.close()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def ask(handler: Handler, timeout_seconds: float = 60.0) -> None:
    """Run the check in this process against a server that does what `handler` does."""
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await asyncio.to_thread(healthcheck.check, f"127.0.0.1:{port}", timeout_seconds=timeout_seconds)


@pytest.mark.parametrize("handler", [_http1, _closing])
async def test_a_port_that_speaks_something_else_is_unhealthy(handler: Handler) -> None:
    with pytest.raises((healthcheck.UnhealthyError, ConnectionError)):
        await ask(handler)


async def test_a_server_that_never_answers_is_given_up_on_at_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        await ask(_silent, timeout_seconds=0.05)


async def test_padding_pings_and_split_messages_are_understood() -> None:
    await ask(_padded)


async def test_a_call_without_an_address_says_how_to_call_it() -> None:
    for arguments in (["router"], ["--cert", "a.pem", "127.0.0.1:1"], ["--tls"], ["--no-such", "127.0.0.1:1"]):
        code, output = await run(*arguments)
        assert code == 1
        assert "usage" in output
