import subprocess
from pathlib import Path

import grpc
import grpc.aio
import pytest

from lorrery.service.errors import SettingsError
from lorrery.service.network.channel import open_channel, options_for
from lorrery.service.network.server import bind, new_server
from lorrery.service.settings.sections import TlsSettings
from tests.needs import OPENSSL, needs_openssl
from tests.service.services import ECHO, EchoService

pytestmark = needs_openssl


def openssl(*arguments: str, folder: Path) -> None:
    subprocess.run([OPENSSL, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a server and a client certificate of it, and an authority that nobody knows."""
    folder = tmp_path_factory.mktemp("tls")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        openssl(
            "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}", folder=folder
        )
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}", folder=folder)
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-extfile", "san", folder=folder,
        )  # fmt: skip
    return folder


async def echo(server_tls: TlsSettings, client_tls: TlsSettings, host: str = "127.0.0.1", name: str = "") -> bytes:
    server = new_server()
    EchoService().register(server)
    address = bind(server, f"{host}:0", server_tls)
    await server.start()
    try:
        async with open_channel(address, client_tls, options=options_for(name)) as channel:
            return await channel.unary_unary(ECHO)(b"hello", timeout=60)
    finally:
        await server.stop(None)


async def test_client_that_knows_the_authority_is_served(certificates: Path):
    server = TlsSettings(cert=certificates / "server.pem", key=certificates / "server.key")
    assert await echo(server, TlsSettings(ca=certificates / "ca.pem")) == b"hello"


async def test_an_address_that_a_name_has_shows_a_certificate_of_the_name(certificates: Path):
    server = TlsSettings(cert=certificates / "server.pem", key=certificates / "server.key")
    client = TlsSettings(ca=certificates / "ca.pem")
    assert await echo(server, client, "127.0.0.2", "localhost") == b"hello"
    for name in ("", "another.test"):
        with pytest.raises(grpc.aio.AioRpcError):
            await echo(server, client, "127.0.0.2", name)


async def test_client_with_a_certificate_is_served_where_one_is_demanded(certificates: Path):
    ca = certificates / "ca.pem"
    server = TlsSettings(cert=certificates / "server.pem", key=certificates / "server.key", ca=ca)
    client = TlsSettings(cert=certificates / "client.pem", key=certificates / "client.key", ca=ca)
    assert await echo(server, client) == b"hello"


@pytest.mark.parametrize("who", ["plain", "unknown authority", "without certificate", "stranger's certificate"])
async def test_others_are_refused(certificates: Path, who: str):
    ca = certificates / "ca.pem"
    server = TlsSettings(cert=certificates / "server.pem", key=certificates / "server.key", ca=ca)
    client = {
        "plain": TlsSettings(),
        "unknown authority": TlsSettings(
            cert=certificates / "client.pem", key=certificates / "client.key", ca=certificates / "stranger.pem"
        ),
        "without certificate": TlsSettings(ca=ca),
        "stranger's certificate": TlsSettings(
            cert=certificates / "stranger.pem", key=certificates / "stranger.key", ca=ca
        ),
    }[who]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo(server, client)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_certificate_that_is_none_is_a_settings_error(tmp_path: Path):
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    with pytest.raises(SettingsError, match="server_tls"):
        bind(new_server(), "127.0.0.1:0", TlsSettings(cert=garbage, key=garbage))
