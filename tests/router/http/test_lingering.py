"""A client that is answered before it has sent all: it hears the answer, and may not send on for ever."""

import asyncio
import json
import socket
import ssl
import time
from pathlib import Path

from typer.testing import CliRunner

from lorrery.cli.certs import app
from tests.cluster.harness import wait_until
from tests.router.http.conftest import TIMEOUT_SECONDS, HttpRouter, StartHttp, one_answer, rest_of

POST = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
MIB = b" " * (1 << 20)
CHUNK = b"%x\r\n%b\r\n" % (len(MIB), MIB)


def told(router: HttpRouter, *sent: bytes, tls: ssl.SSLContext | None = None) -> int:
    """Return the status of the answer, with a reason, that a client finds which reads nothing until it has sent all."""
    with socket.create_connection(("localhost", router.port), TIMEOUT_SECONDS) as plain:
        connection = plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")
        for part in sent:
            connection.sendall(part)
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(1 << 16)
        connection.close()
    content = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert content.get("detail") or content["error"]["message"]
    return int(answer.split()[1])


async def test_a_client_that_sends_all_before_it_reads_hears_its_answer(start_http: StartHttp) -> None:
    router = await start_http()
    announced = POST + b"content-length: %d\r\n\r\n" % (40 << 20)
    cases = {
        413: (announced, *[MIB] * 40),
        431: (b"GET / HTTP/1.1\r\nx: ", *[MIB.replace(b" ", b"y")] * 8),
        400: (b"\0", *[MIB] * 8),
    }
    for expected, sent in cases.items():
        assert await asyncio.to_thread(told, router, *sent) == expected
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    assert await asyncio.to_thread(told, router, head, *[CHUNK] * 60) == 413
    other = head.replace(b"application/json", b"text/plain")  # answered at once, and kept open for a next request
    assert await asyncio.to_thread(told, router, other, *[CHUNK] * 60) == 400


async def test_a_client_over_the_limit_of_connections_hears_so_though_it_has_a_body(start_http: StartHttp) -> None:
    router = await start_http(router={"http_max_connections": 1})
    async with router.connection() as (reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await one_answer(reader)
        sent = (POST + b"content-length: %d\r\n\r\n" % (8 << 20), *[MIB] * 8)
        assert await asyncio.to_thread(told, router, *sent) == 503


async def test_a_client_over_tls_hears_its_answer_too(start_http: StartHttp, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, [str(tmp_path)]).exit_code == 0
    router = await start_http(server_tls={"cert": tmp_path / "router.pem", "key": tmp_path / "router.key"})
    tls = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    announced = POST + b"content-length: %d\r\n\r\n" % (40 << 20)
    assert await asyncio.to_thread(told, router, announced, *[MIB] * 40, tls=tls) == 413


async def test_the_connection_is_half_closed_at_once(start_http: StartHttp) -> None:
    router = await start_http(router={"reader_timeout_seconds": 60.0})
    async with router.connection() as (reader, writer):
        writer.write(POST + b"content-length: 1000000000\r\n\r\n")
        assert b" 413 " in await rest_of(reader)
        writer.write(MIB)  # which is taken
        await writer.drain()


async def send_on(writer: asyncio.StreamWriter, part: bytes, pause_seconds: float) -> int:
    """Send until the connection is reset; return how many bytes."""
    num_bytes = 0
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            try:
                writer.write(part)
                await writer.drain()
            except ConnectionError:
                return num_bytes
            num_bytes += len(part)
            await asyncio.sleep(pause_seconds)


async def test_a_client_that_never_stops_is_cut(start_http: StartHttp) -> None:
    router = await start_http(router={"reader_timeout_seconds": 60.0})
    async with router.connection() as (_, writer):
        writer.write(POST + b"content-length: 10000000000\r\n\r\n")
        assert await send_on(writer, MIB, 0.0) < 100 << 20
    router = await start_http(router={"reader_timeout_seconds": 0.3})
    async with router.connection() as (_, writer):
        writer.write(POST + b"content-length: 10000000000\r\n\r\n")
        begun = time.monotonic()
        await send_on(writer, b" ", 0.05)
        assert time.monotonic() - begun >= 0.3


async def test_a_silent_client_does_not_hold_the_connection(start_http: StartHttp) -> None:
    router = await start_http(router={"reader_timeout_seconds": 0.3, "http_max_connections": 1})
    async with router.connection() as (reader, writer):
        writer.write(POST + b"content-length: 10000000000\r\n\r\n")
        assert b" 413 " in await rest_of(reader)

        async def is_room() -> bool:
            return b"200 OK" in await router.exchange(
                b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            )

        await wait_until(is_room)
