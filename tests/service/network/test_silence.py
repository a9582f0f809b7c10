import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lorrery.loadgen.client import RouterClient
from lorrery.service.errors import LorreryError
from lorrery.service.network.channel import open_channel
from lorrery.service.network.server import bind, new_server
from lorrery.service.network.silence import NOTHING, why_silent
from lorrery.service.settings.sections import TlsSettings
from lorrery.view.live import LiveFeed


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
    monkeypatch.setattr("lorrery.view.live.ANSWER_SECONDS", 0.3)
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
