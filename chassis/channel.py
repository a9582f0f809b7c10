"""The channel with which a process dials another.

gRPC's own defaults wait up to two minutes before they dial again, and share one connection between all channels to
one address. A peer that has died with its host is noticed by pings. Unknown option names are ignored by gRPC without a
word, so `tests/chassis/test_channel.py` checks their effect.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.sections import MAX_PORT, TlsSettings

MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either way; gRPC's default of 4 MiB is one million token ids."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


_HOST_PORT = re.compile(r"(?:\[[^\[\]/\s]+\]|[^:/\[\]\s]+):(\d{1,5})")
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")


def check_target(option: str, target: str) -> None:
    """Check that gRPC can dial `target`; it would try a URL or a host without a port until its patience ends.

    Args:
        option: the flag that it came with.
        target: HOST:PORT, or a target with one of gRPC's own schemes (`dns:///...`, `unix:...`).

    Raises:
        SettingsError: it is neither; the message says what would do.
    """
    if target.startswith(_SCHEMES):
        return
    match = _HOST_PORT.fullmatch(target)
    if match is not None and 0 < int(match[1]) <= MAX_PORT:
        return
    inside = target.partition("://")[2].partition("/")[0]
    cure = f"; try {option} {inside}" if _HOST_PORT.fullmatch(inside) else ""
    raise SettingsError(f"{option} {target}: HOST:PORT expected, with no scheme and no path{cure}")


def open_channel(address: str, tls: TlsSettings, *, options: Sequence[tuple[str, str | int]] = ()) -> grpc.aio.Channel:
    """Return a channel to `address`; it dials when first used, and again after a loss within 200 ms to 2 s.

    Args:
        address: HOST:PORT or any gRPC target.
        tls: `ca` alone checks the server; with `cert` and `key` the server can check us; nothing set: plain text.
        options: further channel options; they win over the chassis's own.

    Raises:
        SettingsError: a certificate file cannot be read.
    """
    merged = tuple({**dict(OPTIONS), **dict(options)}.items())
    if tls.ca is None and tls.cert is None:
        return grpc.aio.insecure_channel(address, options=merged)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=read_pem(tls.ca, "client_tls.ca"),
        private_key=read_pem(tls.key, "client_tls.key"),
        certificate_chain=read_pem(tls.cert, "client_tls.cert"),
    )
    return grpc.aio.secure_channel(address, credentials, options=merged)


def read_pem(path: Path | None, key: str) -> bytes | None:
    """Return a certificate file's bytes, or None where no file is set.

    Raises:
        SettingsError: the file cannot be read; names `key`.
    """
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{key}: {path}: {error.strerror}") from None
