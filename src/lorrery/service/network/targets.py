"""Dial targets in settings: an address, or a name that stands for several.

HOST:PORT is dialled as it is. `dns:///NAME:PORT` stands for every address of NAME; `dns://SERVER[:PORT]/NAME:PORT`
resolves it at that name server instead of the system's resolver. The syntax is gRPC's naming syntax.
"""

import ipaddress
import re
from typing import NamedTuple

DNS_PORT = 53
MAX_LABEL, MAX_NAME = 63, 253
"""In characters, by RFC 1035."""

_TARGET = re.compile(r"dns://(?P<server>[^/]*)/(?P<host>[^/:\[\]\s]+):(?P<port>\d{1,5})")


class DnsName(NamedTuple):
    """A name that stands for addresses.

    Attributes:
        host: the name.
        port: the same at all its addresses.
        server: IP address of the name server; empty: the system's resolver, with its search list and `/etc/hosts`.
        server_port: port of that name server.
    """

    host: str
    port: int
    server: str = ""
    server_port: int = DNS_PORT


def parse_name(target: str) -> DnsName | None:
    """Parse a target with a name; None: it is an address.

    Raises:
        ValueError: it begins like a target with a name, but is malformed.
    """
    if not target.startswith("dns:"):
        return None
    match = _TARGET.fullmatch(target)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise ValueError(f"dns:///NAME:PORT or dns://SERVER[:PORT]/NAME:PORT expected, got {target!r}")
    host, port, authority = match["host"].removesuffix("."), int(match["port"]), match["server"]
    if len(host) > MAX_NAME or not all(0 < len(label) <= MAX_LABEL for label in host.split(".")):
        raise ValueError(
            f"the name in {target!r} must have labels of 1 to {MAX_LABEL} characters between its dots,"
            f" and {MAX_NAME} in all"
        )
    if not authority:
        return DnsName(host, port)
    try:
        server, server_port = _split(authority)
        return DnsName(host, port, str(ipaddress.ip_address(server)), server_port)
    except ValueError:
        raise ValueError(f"the name server in {target!r} must be an IP address, with a port or without") from None


def _split(authority: str) -> tuple[str, int]:
    if authority.startswith("["):
        server, rest = authority[1:].split("]")
        return server, _port(rest.removeprefix(":")) if rest else DNS_PORT
    if authority.count(":") == 1:
        server, _, port = authority.partition(":")
        return server, _port(port)
    return authority, DNS_PORT


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**16):
        raise ValueError(text)
    return int(text)
