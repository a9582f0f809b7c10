"""Clients that stop reading: their connections go, and with them what they left unread."""

import asyncio
import contextlib
import json
import select
import socket
import ssl
from collections.abc import AsyncIterator
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.router.http.connection import LOOKS, ReaderWatch
from tests.router.http.conftest import HttpRouter, StartHttp

TIMEOUT_SECONDS = 4.0
LONG = {"max_req_input_len": 300_000, "max_req_total_len": 400_000}


class FakeLoop:
    """One timer at most, which fires when it is told to."""

    def __init__(self) -> None:
        self.due = None

    def call_later(self, seconds, callback):
        assert (self.due, seconds) == (None, 1.0)
        self.due = callback
        return self

    def cancel(self) -> None:
        self.due = None

    def fire(self) -> None:
        due, self.due = self.due, None
        due()


class FakeTransport:
    """Holds so many bytes."""

    unread, aborted = 0, False

    def unread_bytes(self) -> int:
        return self.unread

    def __init__(self) -> None:
        self.socket = Mock(spec=socket.socket)

    def get_extra_info(self, name):
        return getattr(self, name)

    def abort(self) -> None:
        self.aborted = True


@given(taken=st.lists(st.integers(0, 3), max_size=40), unread=st.integers(1, 60))
def test_a_reader_is_cut_when_it_takes_nothing_for_all_looks_in_a_row(taken: list[int], unread: int) -> None:
    loop, transport = FakeLoop(), FakeTransport()
    watch = ReaderWatch(transport, transport.unread_bytes, loop, TIMEOUT_SECONDS)  # type: ignore[arg-type]
    transport.unread = unread
    watch.begin()
    watch.begin()  # changes nothing
    num_same = 0
    for part in taken:
        if loop.due is None:
            break
        num_same = num_same + 1 if min(part, transport.unread) == 0 else 0
        transport.unread -= min(part, transport.unread)
        loop.fire()
        assert transport.aborted == (num_same == LOOKS)
        assert (loop.due is None) == (transport.aborted or transport.unread == 0)
    watch.end()
    assert loop.due is None


def test_nothing_unread_is_not_watched() -> None:
    loop = FakeLoop()
    transport = FakeTransport()
    ReaderWatch(transport, transport.unread_bytes, loop, TIMEOUT_SECONDS).begin()  # type: ignore[arg-type]
    assert loop.due is None


@contextlib.asynccontextmanager
async def asks_for_a_megabyte(
    router: HttpRouter, connection: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[socket.socket]:
    """Yield a client that has sent its request, and takes little at a time."""
    body = json.dumps({"prompt": "word " * 150_000}).encode()
    head = (
        f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: {connection}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", router.port))
        client = plain
        if tls is not None:
            client = await asyncio.to_thread(tls.wrap_socket, plain, server_hostname="localhost")
        await asyncio.to_thread(client.sendall, head.encode() + body)
        yield client
        client.close()


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_an_answer_that_is_not_read_does_not_hold_its_connection(start_http: StartHttp, connection: str) -> None:
    router = await start_http(router={"reader_timeout_seconds": 0.2}, scheduler=LONG)
    async with asks_for_a_megabyte(router, connection) as client:
        cut = select.poll()
        cut.register(client, 0)  # that the server resets it, whatever there is to read
        events = await asyncio.to_thread(cut.poll, 60_000)
    assert events, "the connection stays"


async def test_a_drain_waits_until_answers_are_taken(start_http: StartHttp) -> None:
    router = await start_http(scheduler=LONG)
    async with router.connection() as (_, writer):  # whose body never comes
        writer.write(b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n")
        await router.server.answered()
        async with asks_for_a_megabyte(router, "close") as client:
            assert await asyncio.to_thread(client.recv, 9) == b"HTTP/1.1 "
            answered = asyncio.create_task(router.server.answered())
            assert not (await asyncio.wait([answered], timeout=0.1))[0]
            while await asyncio.to_thread(client.recv, 1 << 20):
                pass
            async with asyncio.timeout(60):
                await answered
