"""The gRPC channel of a client.

gRPC's defaults wait up to two minutes before dialling again, and share one connection between all channels to the same
address. Pings detect a peer whose host has died. gRPC silently ignores unknown option names, so
`tests/service/network/test_channel.py` checks their effect.

gRPC hides the cause from a call that waits for a connection: such a call ends with DEADLINE_EXCEEDED. One that does not
wait fails with the error of the last attempt to connect, such as that of a TLS handshake. `why_silent` makes one.
"""

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Iterator, Sequence

import grpc
import grpc.aio

from lorrery.service.errors import SettingsError
from lorrery.service.network.credentials import Watched
from lorrery.service.network.tls import Pems, read_pems
from lorrery.service.settings.sections import MAX_PORT, TlsSettings

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A peer restarted elsewhere has a new address under its name; gRPC would resolve it again only after half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Unlimited: a client trusts the server's answers, and a plan may carry the outputs of a whole batch. gRPC's default
    # is 4 MiB, one million token ids; sending is unlimited by default.
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    # Services of a cluster reach each other directly; gRPC would dial even 127.0.0.1 through the environment's proxy.
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without these two (grpcio 1.85) a ping may take a minute to be answered, and after two pings without a message
    # none is sent for a minute: a scheduler that hangs would be noticed after 70 to 110 s, not 20.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


def options_for(host: str) -> tuple[tuple[str, str], ...]:
    """Return options for a channel to a server whose certificate names `host`; empty: the host of the address."""
    return (("grpc.ssl_target_name_override", host),) if host else ()


_HOST_PORT = re.compile(r"(?:\[[^\[\]/\s]+\]|[^:/\[\]\s]+):(\d{1,5})")
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")


def check_target(option: str, target: str) -> None:
    """Check that gRPC can dial `target`; gRPC itself would retry a URL or a host without a port until it times out.

    Args:
        option: the flag that gave it.
        target: HOST:PORT, or a target with one of gRPC's own schemes (`dns:///...`, `unix:...`).

    Raises:
        SettingsError: it is neither; the message suggests a fix.
    """
    if target.startswith(_SCHEMES):
        return
    match = _HOST_PORT.fullmatch(target)
    if match is not None and 0 < int(match[1]) <= MAX_PORT:
        return
    inside = target.partition("://")[2].partition("/")[0]
    cure = f"; try {option} {inside}" if _HOST_PORT.fullmatch(inside) else ""
    raise SettingsError(f"{option} {target}: HOST:PORT expected, with no scheme and no path{cure}")


async def own_host(address: str) -> str:
    """Return this host's address as seen by a peer, or its name if the peer's address cannot be resolved.

    Args:
        address: HOST:PORT of the peer.
    """
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    try:
        loop = asyncio.get_running_loop()
        family, _, _, _, peer = (await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM))[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def open_channel(address: str, tls: TlsSettings, *, options: Sequence[tuple[str, str | int]] = ()) -> grpc.aio.Channel:
    """Return a channel to `address`; it dials on first use, and 200 ms to 2 s after a loss.

    Args:
        address: HOST:PORT or any gRPC target.
        tls: `ca` alone checks the server; `cert` and `key` let the server check this side; nothing set: plain text.
        options: further channel options, which override those of every channel.

    Raises:
        SettingsError: a certificate cannot be used.
    """
    return _open(address, read_pems(tls, "client_tls"), options)


ANEW_SECONDS = 10.0
"""How long a channel may fail to connect before it is reopened.

gRPC resolves a name without an address at growing intervals of up to two minutes, which no option bounds.
"""


class Dialler:
    """The channel to one address; reopened if our certificates have changed, or if it cannot connect.

    Args:
        address: HOST:PORT or any gRPC target.
        pems: the client's certificates, read once for all diallers of a process, so that a new dialler that starts
            while the files change still gets the previous content.
        options: further channel options.
    """

    def __init__(self, address: str, pems: Watched[Pems], options: Sequence[tuple[str, str | int]] = ()) -> None:
        self._address, self._pems, self._options = address, pems, options
        self._opened_with = self._pems.current()
        self._channel = self._open()
        self._failing_since: float | None = None  # monotonic

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, as last opened."""
        return self._channel

    async def renew(self) -> bool:
        """Reopen the channel if needed; return whether it was. Open calls on it are lost.

        Call this before each attempt to reach the peer.
        """
        pems = self._pems.current()
        if pems is self._opened_with and not self._fails_for_long():
            return False
        old, self._opened_with = self._channel, pems
        self._channel, self._failing_since = self._open(), None
        await old.close()
        return True

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def _fails_for_long(self) -> bool:
        now = time.monotonic()
        if self._channel.get_state() in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE):
            self._failing_since = None
        elif self._failing_since is None:
            self._failing_since = now
        return self._failing_since is not None and now >= self._failing_since + ANEW_SECONDS

    def _open(self) -> grpc.aio.Channel:
        return _open(self._address, self._opened_with, self._options)


@contextlib.contextmanager
def failing_when_closed() -> Iterator[None]:
    """Make calls in the body fail as UNAVAILABLE if another task closes their channel.

    gRPC raises in a task that awaits such a call as if the task had been cancelled, which would end it silently.

    Raises:
        grpc.aio.AioRpcError: the channel was closed.
    """
    try:
        yield
    except grpc.aio.UsageError as error:
        reason = str(error)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        reason = "the channel was closed during the call"
    else:
        return
    none = grpc.aio.Metadata()
    raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details=reason)


def _open(address: str, pems: Pems, options: Sequence[tuple[str, str | int]]) -> grpc.aio.Channel:
    merged = tuple({**dict(OPTIONS), **dict(options)}.items())
    if pems.ca is None and pems.cert is None:
        return grpc.aio.insecure_channel(address, options=merged)
    credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
    return grpc.aio.secure_channel(address, credentials, options=merged)


NOTHING = "nothing answers there"
_CONNECT_SECONDS = 1.0
_ATTEMPT_SECONDS = 1.0
_CHECK = "/grpc.health.v1.Health/Check"
_BEFORE_CAUSE = "last error: "


async def why_silent(target: str, channel: grpc.aio.Channel, other_cure: str = "") -> str:
    """Return the reason, after trying a TCP connection to the address and a call; takes at most two seconds.

    Args:
        target: HOST:PORT, or `dns:///HOST:PORT`; other gRPC targets are not examined.
        channel: to the target; the call that got no answer was made on it.
        other_cure: what else to try where something listens; empty: nothing.
    """
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError, ValueError):  # TimeoutError is an OSError
        return NOTHING
    writer.close()
    cause = await _last_error(channel)
    return (
        "something listens there, but does not answer as gRPC does; give the router's gRPC address, and [client_tls] if"
        f" and only if it has [server_tls]{other_cure and f', or {other_cure}'}{cause and f'; gRPC says: {cause}'}"
    )


async def _last_error(channel: grpc.aio.Channel) -> str:
    """Return why the channel's last attempt to connect failed; empty: it is connected, or still tries."""
    call = channel.unary_unary(_CHECK, bytes, bytes)(b"", timeout=_ATTEMPT_SECONDS)
    try:
        await call
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        return details.partition(_BEFORE_CAUSE)[2] or details if error.code() is grpc.StatusCode.UNAVAILABLE else ""
    finally:
        call.cancel()
    return ""
