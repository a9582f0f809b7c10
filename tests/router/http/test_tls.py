"""TLS of the HTTP edge: roles in certificates, and files that change."""

import asyncio
import contextlib
import select
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from lorrery.cli.certs import app
from lorrery.router.http import connection
from lorrery.service.errors import SettingsError
from lorrery.service.web import handshakes
from tests.cluster.harness import wait_until
from tests.hostile.handshakes import hello
from tests.router.http.conftest import HttpRouter, StartHttp, rest_of
from tests.router.http.test_stuck_reader import LONG, asks_for_a_megabyte

CLOSING = b"host: localhost\r\nconnection: close\r\n"
LOAD = b'{"lora_name": "new", "rank": 8}'
ASKS = {
    "load": b"POST /v1/load_lora_adapter HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    % len(LOAD)
    + CLOSING
    + b"\r\n"
    + LOAD,
    "version": b"GET /version HTTP/1.1\r\n" + CLOSING + b"\r\n",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificates of two authorities."""
    found = tuple(tmp_path_factory.mktemp("certs") for _ in range(2))
    for folder in found:
        assert CliRunner().invoke(app, [str(folder)]).exit_code == 0
    return found[0], found[1]


def client(folder: Path, role: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if role is not None:
        context.load_cert_chain(folder / f"{role}.pem", folder / f"{role}.key")
    return context


async def served(router: HttpRouter, tls: ssl.SSLContext) -> bool:
    try:
        return b"200 OK" in await router.exchange(ASKS["version"], tls)
    except (ssl.SSLError, ConnectionError):
        return False


def status(answer: bytes) -> int:
    return int(answer.split()[1])


async def test_a_certificate_s_role_decides(start_http: StartHttp, folders: tuple[Path, Path]) -> None:
    folder, _ = folders
    tls = {"cert": folder / "router.pem", "key": folder / "router.key", "ca": folder / "ca.pem"}
    router = await start_http(server_tls=tls)
    assert status(await router.exchange(ASKS["version"], client(folder, "client"))) == 200
    assert status(await router.exchange(ASKS["load"], client(folder, "client"))) == 403
    assert status(await router.exchange(ASKS["load"], client(folder, "operator"))) == 503  # no scheduler, but leave
    assert not await served(router, client(folder, None))


async def test_certificates_and_authority_are_read_again(
    start_http: StartHttp, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = folders

    def put(folder: Path) -> None:
        for name in ("router.pem", "router.key", "ca.pem"):
            shutil.copy(folder / name, tmp_path / f"{name}.new")
            (tmp_path / f"{name}.new").replace(tmp_path / name)

    put(old)
    tls = {"cert": tmp_path / "router.pem", "key": tmp_path / "router.key", "ca": tmp_path / "ca.pem"}
    router = await start_http(server_tls=tls)
    assert await served(router, client(old, "client"))
    assert not await served(router, client(new, "client"))
    put(new)
    await wait_until(lambda: served(router, client(new, "client")))
    assert not await served(router, client(old, "client"))
    # The old authority's clients are refused even by a client that trusts the new server.
    mixed = client(new, None)
    mixed.load_cert_chain(old / "client.pem", old / "client.key")
    assert not await served(router, mixed)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_is_not_resumed_once_its_authority_is_taken_out(
    start_http: StartHttp, folders: tuple[Path, Path], tmp_path: Path, version: ssl.TLSVersion
) -> None:
    folder, other = folders
    ca = tmp_path / "ca.pem"
    ca.write_bytes((folder / "ca.pem").read_bytes() + (other / "ca.pem").read_bytes())
    router = await start_http(server_tls={"cert": folder / "router.pem", "key": folder / "router.key", "ca": ca})
    tls = client(folder, None)
    tls.load_cert_chain(other / "client.pem", other / "client.key")
    tls.minimum_version = tls.maximum_version = version

    def ask(session: ssl.SSLSession | None = None) -> tuple[bytes, bool | None, ssl.SSLSession | None]:
        with (
            socket.create_connection(("localhost", router.port), timeout=60) as plain,
            tls.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(ASKS["version"])
            answer = connection.recv(1 << 16)
            return answer[:15], connection.session_reused, connection.session

    answer, _, session = await asyncio.to_thread(ask)
    assert answer == b"HTTP/1.1 200 OK"
    assert (await asyncio.to_thread(ask, session))[:2] == (answer, True)
    ca.write_bytes((folder / "ca.pem").read_bytes())
    await wait_until(lambda: refused(router, tls))
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        answer, resumed, _ = await asyncio.to_thread(ask, session)
        assert (answer, resumed) == (b"", False)


@pytest.mark.parametrize("section", ["server_tls", "router.http_tls"])
async def test_a_file_that_is_not_there_is_named_with_its_setting(start_http: StartHttp, section: str) -> None:
    missing = {"cert": Path("nowhere.pem"), "key": Path("nowhere.key")}
    with pytest.raises(SettingsError, match=rf"^{section}\.cert: nowhere\.pem: No such file"):
        await start_http(**({"server_tls": missing} if section == "server_tls" else {"router": {"http_tls": missing}}))


async def refused(router: HttpRouter, tls: ssl.SSLContext) -> bool:
    return not await served(router, tls)


async def test_a_handshake_that_does_not_end_is_cut(start_http: StartHttp, folders: tuple[Path, Path]) -> None:
    folder, _ = folders
    tls = {"cert": folder / "router.pem", "key": folder / "router.key"}
    router = await start_http(server_tls=tls, router={"http_request_seconds": 0.2})
    for begun in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"):
        assert await router.exchange(begun) == b""


@pytest.mark.parametrize("begun", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x40\x00" + bytes(handshakes.HELLO_BYTES)])
async def test_what_is_no_first_message_of_a_handshake_is_cut_at_once(
    start_http: StartHttp, folders: tuple[Path, Path], begun: bytes
) -> None:
    folder, _ = folders
    router = await start_http(server_tls={"cert": folder / "router.pem", "key": folder / "router.key"})
    async with router.connection() as (reader, writer):
        writer.write(begun)
        with contextlib.suppress(ConnectionError):
            assert await rest_of(reader) == b""


async def test_the_oldest_handshake_ends_where_too_many_wait_for_their_client(
    start_http: StartHttp, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_UNDER_WAY", 2)
    folder, _ = folders
    router = await start_http(server_tls={"cert": folder / "router.pem", "key": folder / "router.key"})
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(router.connection()) for _ in range(3)]
        readers = [reader for reader, _ in opened]
        for reader, writer in opened:
            writer.write(hello())
            assert (await reader.read(1))[0] == 22  # its answer
        with contextlib.suppress(ConnectionError):
            await rest_of(readers[0])
        assert readers[0].at_eof() or readers[0].exception()
        assert not any(reader.at_eof() for reader in readers[1:])
        assert await served(router, client(folder, None))


async def test_handshakes_count_as_connections(start_http: StartHttp, folders: tuple[Path, Path]) -> None:
    folder, _ = folders
    tls = {"cert": folder / "router.pem", "key": folder / "router.key"}
    router = await start_http(server_tls=tls, router={"http_max_connections": 2, "http_request_seconds": 5.0})
    async with router.connection() as (first, _), router.connection() as (second, _):  # neither sends anything
        answer = await router.exchange(ASKS["version"], client(folder, None))
        assert (status(answer), b"connections" in answer) == (503, True)
        for one in (first, second):
            assert await rest_of(one) == b""
        async with router.connection():
            assert await served(router, client(folder, None))


async def test_connections_far_over_the_limit_are_closed_without_a_word(
    start_http: StartHttp, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_REFUSED", 2)
    monkeypatch.setattr(connection, "MAX_REFUSED", 2)
    folder, _ = folders
    for tls in ({}, {"cert": folder / "router.pem", "key": folder / "router.key"}):
        router = await start_http(server_tls=tls, router={"http_max_connections": 1})
        async with contextlib.AsyncExitStack() as stack:
            readers = [(await stack.enter_async_context(router.connection()))[0] for _ in range(4)]
            with contextlib.suppress(ConnectionError):
                assert await rest_of(readers.pop()) == b""
            assert not any(reader.at_eof() for reader in readers)
            for reader in readers[1:]:
                assert await rest_of(reader) == b""  # in a second
            assert not readers[0].at_eof()


async def test_a_server_that_stops_ends_handshakes_that_have_not_begun(folders: tuple[Path, Path]) -> None:
    folder, _ = folders
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "router.pem", folder / "router.key")
    connections: set[Any] = set()
    made: list[handshakes.Handshake] = []

    class Stopping(handshakes.Handshake):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            assert connections == {self}
            made.append(self)
            self.shutdown()

    loop = asyncio.get_running_loop()
    begun = handshakes.Handshakes(Mock(), lambda: tls, 30.0, connections, 1)
    server = await loop.create_server(lambda: Stopping(begun), "localhost", 0)
    async with server:
        reader, writer = await asyncio.open_connection("localhost", server.sockets[0].getsockname()[1])
        writer.write(hello())
        with contextlib.suppress(ConnectionError):
            assert await rest_of(reader) == b""
        writer.close()
    assert (len(made), connections) == (1, set())


async def test_what_waits_beneath_tls_counts_as_unread(start_http: StartHttp, folders: tuple[Path, Path]) -> None:
    folder, _ = folders
    tls = {"cert": folder / "router.pem", "key": folder / "router.key"}
    router = await start_http(server_tls=tls, scheduler=LONG)
    async with asks_for_a_megabyte(router, "close", client(folder, None)) as reader:
        assert await asyncio.to_thread(reader.recv, 9) == b"HTTP/1.1 "
        answered = asyncio.create_task(router.server.answered())
        assert not (await asyncio.wait([answered], timeout=0.1))[0]
        while await asyncio.to_thread(reader.recv, 1 << 20):
            pass
        async with asyncio.timeout(10):
            await answered
    router = await start_http(server_tls=tls, scheduler=LONG, router={"reader_timeout_seconds": 0.2})
    async with asks_for_a_megabyte(router, "keep-alive", client(folder, None)) as reader:
        cut = select.poll()
        cut.register(reader, 0)  # that the server resets it, whatever there is to read
        assert await asyncio.to_thread(cut.poll, 10_000), "the connection stays"
