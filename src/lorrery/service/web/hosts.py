"""Names under which an HTTP server without credentials answers, so that no page of another site gets anything from it.

The owner of evil.example can let that name stand for 127.0.0.1, or for any address that a visitor's browser reaches: to
the browser, this server is then the page's own (DNS rebinding). The browser still says which name it used, in `Host`.
An address there is no such name, and *.localhost never leaves the machine. Other names are the server's own, and those
of `allowed_hosts`. `Origin` names the page that sends a request; one of another site may not make any, not even one
whose response its browser would withhold.
"""

import socket
from collections.abc import Collection
from fnmatch import fnmatchcase
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from lorrery.service.names import quoted


class Hosts:
    """Checks the names that requests use.

    Args:
        listen: HOST:PORT of the server; the name of the machine too is its own if it listens on all addresses.
        allowed: patterns of further names.
        origins: of pages that may send requests from elsewhere; `*`: all.
    """

    def __init__(self, listen: str, allowed: Collection[str], origins: Collection[str] = ()) -> None:
        own = listen.rpartition(":")[0].strip("[]").lower()
        address = _ip(own)
        self._names = {socket.gethostname().lower() if address is not None and address.is_unspecified else own}
        self._allowed, self._origins = [pattern.lower() for pattern in allowed], frozenset(origins)

    def refusal(self, host: str, origin: str) -> tuple[HTTPStatus, str] | None:
        """Return the answer to a request that used a wrong name, or comes from another site; None: neither.

        Args:
            host: its header; empty, as from no browser: any.
            origin: likewise.
        """
        name = _name(host)
        if host and _ip(name) is None and not self._is_known(name):
            text = f"{quoted(host)} is no name of this server; call it by its address, or add the name to allowed_hosts"
            return HTTPStatus.MISDIRECTED_REQUEST, text
        if not origin or not self._origins.isdisjoint((origin, "*")):
            return None
        try:
            site = urlsplit(origin).hostname or ""
        except ValueError:
            site = ""
        address = _ip(site)
        if site == name or (address is not None and address.is_loopback) or self._is_known(site):
            return None
        text = f"pages of {quoted(origin)} may send nothing here; see router.http_allowed_origins and allowed_hosts"
        return HTTPStatus.FORBIDDEN, text

    def _is_known(self, name: str) -> bool:
        is_own = name in self._names or name == "localhost" or name.endswith(".localhost")
        return is_own or any(fnmatchcase(name, pattern) for pattern in self._allowed)


def named_in(headers: Collection[tuple[bytes, bytes]]) -> tuple[str, str]:
    """Return `Host` and `Origin` of a head, whose names are in lower case."""
    found = {name: value.decode("latin-1") for name, value in headers if name in (b"host", b"origin")}
    return found.get(b"host", ""), found.get(b"origin", "")


def _name(authority: str) -> str:
    """Return HOST of HOST:PORT, as it is compared."""
    host = authority.partition("]")[0][1:] if authority.startswith("[") else authority.partition(":")[0]
    return host.lower().removesuffix(".")


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
