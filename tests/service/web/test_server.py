"""The web server beside clients that connect and send nothing, or not all of a request, or that are too many."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lorrery.service.web import server as web_server
from lorrery.service.web.server import WebServer

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
REQUEST_SECONDS = 0.3


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "REQUEST_SECONDS", REQUEST_SECONDS)


async def _slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(3 * REQUEST_SECONDS)
        yield b"last"

    await StreamingResponse(parts())(scope, receive, send)


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    server = WebServer(_slow_app, "127.0.0.1:0", "--port")
    host, _, port = server.listen().rpartition(":")
    running = asyncio.create_task(server.run())
    yield host, int(port)
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize(
    ("before", "part"),
    [(b"", b""), (b"", b"\r\n"), (b"", b"GET / HT"), (b"", WHOLE[:-2]), (WHOLE, b"\r\n"), (WHOLE, WHOLE[:-2])],
)
async def test_connection_whose_request_does_not_come_is_closed(address: tuple[str, int], before: bytes, part: bytes):
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(60):
        if before:
            writer.write(before)
            await reader.readuntil(b"0\r\n\r\n")
        writer.write(part)
        assert await reader.read() == b""
    writer.close()


async def test_answer_may_take_longer_than_its_request(address: tuple[str, int]):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(WHOLE)
    async with asyncio.timeout(60):
        assert b"last" in await reader.readuntil(b"0\r\n\r\n")
    writer.close()


async def test_connections_over_the_bound_hear_why_they_are_closed(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(web_server, "REQUEST_SECONDS", 60.0)
    monkeypatch.setattr(web_server, "REFUSED_SECONDS", 1.0)
    async with asyncio.timeout(60):
        first, second, third, silent = [await asyncio.open_connection(*address) for _ in range(4)]
        for _, writer in (first, second, third):
            writer.write(WHOLE)
        for reader, _ in (first, second):
            assert b"200 OK" in await reader.readuntil(b"0\r\n\r\n")
        refused = await third[0].read()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert refused.endswith(b"2 connections are open, and no more are taken; close some, or try later\n")
        assert await silent[0].read() == b""
        first[1].write(WHOLE.replace(b"Host", b"Connection: close\r\nHost"))  # those that are open go on
        assert b"200 OK" in await first[0].read()
        late = await asyncio.open_connection(*address)
        late[1].write(WHOLE)
        assert b"200 OK" in await late[0].readuntil(b"0\r\n\r\n")
    for _, writer in (first, second, third, silent, late):
        writer.close()


@pytest.mark.parametrize(("sent", "status"), [(b"\0", b"400"), (WHOLE, b"503")])
async def test_client_that_sends_all_before_it_reads_hears_its_answer(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, sent: bytes, status: bytes
):
    monkeypatch.setattr(web_server, "REQUEST_SECONDS", 60.0)
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 1 if status == b"400" else 0)
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*address)
        reader._transport.pause_reading()
        writer.write(sent)
        for _ in range(8):
            writer.write(b" " * (1 << 20))
            await writer.drain()
        writer.write_eof()
        reader._transport.resume_reading()
        assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
        writer.close()
