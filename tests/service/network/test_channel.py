"""gRPC ignores options that it does not know, so these tests look at what the options do."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lorrery.loadgen.client import RouterClient
from lorrery.service.errors import LorreryError
from lorrery.service.network import channel as channel_module
from lorrery.service.network.channel import (
    NOTHING,
    OPTIONS,
    Dialler,
    check_target,
    failing_when_closed,
    open_channel,
    why_silent,
)
from lorrery.service.network.server import bind, new_server
from lorrery.service.network.tls import watched_pems
from lorrery.service.settings.sections import TlsSettings
from lorrery.view.wire import LiveFeed
from tests.cluster.harness import wait_until
from tests.cluster.name_server import name_server
from tests.service.services import ECHO, EchoService

PLAIN = TlsSettings()


async def serve(*, lingers: bool = False) -> tuple[grpc.aio.Server, str]:
    server, service = new_server(), EchoService()
    service.lingers = lingers
    service.register(server)
    address = bind(server, "127.0.0.1:0", PLAIN)
    await server.start()
    return server, address


async def test_channel_dials_again_and_again_in_quick_succession():
    dials: asyncio.Queue[float] = asyncio.Queue()

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dials.put_nowait(time.monotonic())
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener, open_channel(address, PLAIN) as channel:
        call = channel.unary_unary(ECHO)(b"", timeout=60, wait_for_ready=True)
        try:
            times = [await dials.get() for _ in range(6)]
        finally:
            call.cancel()
    # 0.2 + 0.32 + 0.51 + 0.82 + 1.31 s, each up to a fifth longer; gRPC's own would be 1 + 1.6 + 2.56 + 4.1 + 6.55.
    assert times[-1] - times[0] < 12


async def test_peer_that_falls_silent_is_noticed_by_pings_though_nothing_was_said_for_long(
    monkeypatch: pytest.MonkeyPatch,
):
    faster = 8  # a ping every 1.25 s, just less often than servers tolerate
    options = [(name, value // faster if name.endswith("_ms") else value) for name, value in OPTIONS]
    monkeypatch.setattr(channel_module, "OPTIONS", tuple(options))
    server, address = await serve(lingers=True)
    host, _, port = address.rpartition(":")
    pinged, hears = asyncio.Semaphore(0), True
    passing: list[asyncio.Task[None]] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, sent: bool) -> None:
        while data := await reader.read(1 << 16):
            if sent and data[3:4] == b"\x06":  # a frame that is a ping
                pinged.release()
            if hears:
                writer.write(data)
        writer.close()
        await writer.wait_closed()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        passing.append(asyncio.create_task(pass_on(reader, to_writer, sent=True)))
        passing.append(asyncio.create_task(pass_on(to_reader, writer, sent=False)))

    listener = await asyncio.start_server(connect, "127.0.0.1", 0)
    own = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with open_channel(own, PLAIN) as channel:
        call = channel.unary_unary(ECHO)(b"")
        async with asyncio.timeout(40):  # gRPC's own minute is longer
            for _ in range(4):
                await pinged.acquire()
            hears = False
            with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                await call
    await server.stop(None)
    await asyncio.gather(*passing)
    listener.close()


@pytest.mark.parametrize("name", ["grpc_proxy", "http_proxy", "https_proxy"])
async def test_a_proxy_of_the_environment_is_not_dialled(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    server, address = await serve()
    async with open_channel(address, PLAIN) as channel:
        assert await channel.unary_unary(ECHO)(b"said", timeout=60) == b"said"
    await server.stop(0)


async def test_channels_to_one_address_have_connections_of_their_own():
    peers: set[str] = set()

    async def peer(_request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        peers.add(context.peer())
        return b""

    server = new_server()
    server.add_registered_method_handlers("test.Peer", {"Peer": grpc.unary_unary_rpc_method_handler(peer)})
    address = bind(server, "127.0.0.1:0", PLAIN)
    await server.start()
    async with open_channel(address, PLAIN) as one, open_channel(address, PLAIN) as other:
        await one.unary_unary("/test.Peer/Peer")(b"", timeout=60)
        await other.unary_unary("/test.Peer/Peer")(b"", timeout=60)
    assert len(peers) == 2
    await server.stop(None)


async def test_own_options_win():
    server, address = await serve()
    async with open_channel(address, PLAIN, options=[("grpc.max_receive_message_length", 10)]) as channel:
        call = channel.unary_unary(ECHO)
        assert await call(bytes(10), timeout=60) == bytes(10)
        try:
            await call(bytes(11), timeout=60)
        except grpc.aio.AioRpcError as error:
            code = error.code()
        else:
            code = None
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)


@pytest.mark.parametrize(
    "target", ["router:50051", "127.0.0.1:1", "[::1]:65535", "dns:///router:1", "unix:/tmp/socket"]
)
def test_host_and_port_and_grpcs_own_schemes_can_be_dialled(target: str):
    check_target("--target", target)


async def test_a_call_whose_channel_is_closed_fails_and_one_that_is_cancelled_is_cancelled() -> None:
    async def call(channel: grpc.aio.Channel) -> None:
        with failing_when_closed():
            await channel.unary_unary(ECHO)(b"", timeout=60, wait_for_ready=True)

    channel = open_channel("127.0.0.1:1", PLAIN)
    cut, cancelled = (asyncio.create_task(call(channel)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await channel.close()
    for failing in (cut, call(channel)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await failing
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_peer_that_has_another_address_behind_its_name_is_found_there_soon():
    servers = [new_server(), new_server()]
    for server in servers:
        EchoService().register(server)
    address = bind(servers[0], "127.0.0.1:0", PLAIN)
    port = int(address.rpartition(":")[2])
    await servers[0].start()
    async with name_server() as names:
        names.addresses["moves.test"] = ["127.0.0.1"]
        async with open_channel(names.target("moves.test", port), PLAIN) as channel:
            assert await channel.unary_unary(ECHO)(b"here", timeout=60) == b"here"
            await servers[0].stop(None)
            bind(servers[1], f"127.0.0.2:{port}", PLAIN)
            await servers[1].start()
            names.addresses["moves.test"] = ["127.0.0.2"]
            # gRPC's own would not ask again for half a minute.
            assert await channel.unary_unary(ECHO)(b"there", timeout=60, wait_for_ready=True) == b"there"
    await servers[1].stop(None)


async def test_a_name_that_had_no_address_for_long_is_soon_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "ANEW_SECONDS", 0.1)
    server, address = await serve()
    port = int(address.rpartition(":")[2])
    async with name_server() as names:
        dialler = Dialler(names.target("late.test", port), watched_pems(PLAIN, "client_tls"))
        first, num_opened = dialler.channel, 0

        async def answered() -> bool:
            nonlocal num_opened
            num_opened += await dialler.renew()
            if num_opened == 5:
                names.addresses["late.test"] = ["127.0.0.1"]
            try:
                return await dialler.channel.unary_unary(ECHO)(b"", timeout=60) == b""
            except grpc.aio.AioRpcError:  # the name has no address
                return False

        try:
            await wait_until(answered)
            assert dialler.channel is not first
            assert not await dialler.renew(), "a channel that is connected stays"
        finally:
            await dialler.close()
            await server.stop(None)


@contextlib.asynccontextmanager
async def http_server() -> AsyncIterator[str]:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_load_at_an_http_server_names_its_protocol():
    async with http_server() as target, RouterClient(target, TlsSettings()) as client:
        with pytest.raises(LorreryError, match=r"within 0.3 s: something listens there.* or --protocol openai"):
            await client.cluster(0.3)


async def test_a_feed_of_an_http_server_asks_for_the_grpc_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lorrery.view.wire.ANSWER_SECONDS", 0.3)
    async with http_server() as target, LiveFeed(target) as feed:
        with pytest.raises(LorreryError, match=r"within 0.3 s: something listens there.*give the router's gRPC"):
            await feed.hello()


@pytest.mark.parametrize("target", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "unix:/nowhere", "nowhere"])
async def test_where_nothing_listens_nothing_answers(target: str):
    async with open_channel(target, TlsSettings()) as channel:
        assert await why_silent(target, channel) == NOTHING


def certificate(folder: Path, name: str, end: datetime) -> TlsSettings:
    """Write a certificate that is its own authority, and its key; return its files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    signed = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(end - timedelta(days=2))
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = TlsSettings(cert=folder / f"{name}.pem", key=folder / f"{name}.key")
    assert files.cert is not None
    assert files.key is not None
    files.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files.key.write_bytes(key.private_bytes(*encoding))
    return files


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("another authority", "CERTIFICATE_VERIFY_FAILED"),
        ("expired certificate", "certificate has expired"),
        ("no client certificate", "Socket closed"),
        ("TLS at the client only", "WRONG_VERSION_NUMBER"),
        ("TLS at the server only", "Socket closed"),
    ],
)
async def test_a_failed_handshake_names_its_cause(tmp_path: Path, case: str, cause: str):
    now = datetime.now(UTC)
    ours, other = (certificate(tmp_path, name, now + timedelta(days=1)) for name in ("ours", "other"))
    expired = certificate(tmp_path, "expired", now - timedelta(hours=1))
    plain, trusting = TlsSettings(), TlsSettings(ca=ours.cert)
    server_tls, client_tls = {
        "another authority": (ours, TlsSettings(ca=other.cert)),
        "expired certificate": (expired, TlsSettings(ca=expired.cert)),
        "no client certificate": (ours.model_copy(update={"ca": ours.cert}), trusting),
        "TLS at the client only": (plain, trusting),
        "TLS at the server only": (ours, plain),
    }[case]
    server = new_server()
    target = bind(server, "127.0.0.1:0", server_tls)
    await server.start()
    try:
        async with RouterClient(target, client_tls) as client:
            with pytest.raises(LorreryError, match=rf"or --protocol openai for an HTTP server; gRPC says: .*{cause}"):
                await client.cluster(0.3)
    finally:
        await server.stop(None)


async def test_the_address_behind_a_name_is_examined():
    async with http_server() as target, open_channel(f"dns:///{target}", TlsSettings()) as channel:
        assert "gRPC says: " in await why_silent(f"dns:///{target}", channel)
