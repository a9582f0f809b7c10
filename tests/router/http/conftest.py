"""A router's HTTP server in this process, with nothing behind it."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from lorrery.router.handler import Handler
from lorrery.router.http.server import make_server
from lorrery.router.metrics import RouterMetrics
from lorrery.service.settings.cluster import Settings
from lorrery.service.web.server import WebServer
from lorrery.v1 import types_pb2

TIMEOUT_SECONDS = 60.0


@dataclass
class HttpRouter:
    """A server, and how to talk to it."""

    port: int
    server: WebServer

    @contextlib.asynccontextmanager
    async def connection(
        self, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection."""
        reader, writer = await asyncio.open_connection("localhost", self.port, ssl=tls)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def exchange(self, sent: bytes, tls: ssl.SSLContext | None = None) -> bytes:
        """Return all that the server answers until it closes the connection."""
        async with self.connection(tls) as (reader, writer):
            writer.write(sent)
            return await rest_of(reader)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return what still comes on a connection."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return await reader.read()


async def one_answer(reader: asyncio.StreamReader) -> bytes:
    """Return the next answer of a connection that stays open."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        return head + await reader.readexactly(length)


async def refusal(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str, body: object, **headers: str
) -> tuple[int, dict[str, Any]]:
    """Post a body, as JSON where it is not bytes; return the status, and the answer or the error in it."""
    reader, writer = connection
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "localhost", "content-type": "application/json", "content-length": len(content)} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + content)
    answer, _, rest = (await one_answer(reader)).partition(b"\r\n\r\n")
    content = json.loads(rest)
    return int(answer.split()[1]), content.get("error", content)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests of TLS in uvloop, which services run in: its TLS is its own."""
    return {"uvloop": uvloop.new_event_loop} if item.path.name == "test_tls.py" else {"asyncio": asyncio.new_event_loop}


StartHttp = Callable[..., Any]


@pytest.fixture
def known_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the router know, without a scheduler, that there is an adapter `mine-1` and no other."""

    async def find_adapter(self: Handler, caller: object, adapter_id: str) -> types_pb2.Adapter | None:
        return types_pb2.Adapter(adapter_id=adapter_id, rank=8) if adapter_id == "mine-1" else None

    monkeypatch.setattr(Handler, "find_adapter", find_adapter)


@pytest.fixture
async def start_http() -> AsyncIterator[StartHttp]:
    """Return a function that starts a server; its arguments are settings by section."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**sections: dict[str, Any]) -> HttpRouter:
            registry = CollectorRegistry()
            handler = Handler(Settings.model_validate(sections), RouterMetrics(registry))
            server = make_server(handler, registry, "127.0.0.1:0")
            address = server.listen()
            running = asyncio.create_task(server.run())

            async def stop() -> None:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

            stack.push_async_callback(stop)
            return HttpRouter(int(address.rpartition(":")[2]), server)

        yield start
