"""Which names a server without credentials answers to, and whose pages may call it."""

import socket
from http import HTTPStatus

import pytest

from lorrery.service.web.hosts import Hosts

MACHINE = socket.gethostname()
ALLOWED = ("router", "*.svc.cluster.local")


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("127.0.0.1:8000", ""),  # HTTP/1.0, as no browser
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("127.0.0.1:8000", "localhost:9000"),
        ("127.0.0.1:8000", "LOCALHOST."),
        ("127.0.0.1:8000", "app.localhost:8000"),
        ("127.0.0.1:8000", "10.0.0.7:8000"),
        ("127.0.0.1:8000", "[::1]:8000"),
        ("[::]:8000", "[fd00::7]"),
        ("127.0.0.1:8000", "router:8000"),
        ("0.0.0.0:8000", "Router.prod.svc.cluster.local"),
        ("gpu.lan:8000", "gpu.lan:8000"),
        ("0.0.0.0:8000", MACHINE),
        ("[::]:8000", f"{MACHINE}:8000"),
    ],
)
def test_addresses_and_known_names_are_answered(listen: str, host: str):
    assert Hosts(listen, ALLOWED).refusal(host, "") is None


@pytest.mark.parametrize("listen", ["127.0.0.1:8000", "0.0.0.0:8000", "[::]:8000", "gpu.lan:8000"])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "router.evil.example", "localhost.evil.example", "evil.example:127.0.0.1", "notlocalhost", "x y",
     "127.0.0.1.evil.example", "localhost@evil.example", "svc.cluster.local", "0x7f.1", "\xff", "[evil]", "." ],
)  # fmt: skip
def test_other_names_are_not(listen: str, host: str):
    refusal = Hosts(listen, ALLOWED).refusal(host, "")
    assert refusal is not None
    assert (refusal[0], repr(host) in refusal[1]) == (HTTPStatus.MISDIRECTED_REQUEST, True)


@pytest.mark.parametrize(
    ("host", "origin", "passes"),
    [
        ("localhost:8000", "http://localhost:3000", True),
        ("localhost:8000", "http://127.0.0.1:8000", True),
        ("10.0.0.7:8000", "http://10.0.0.7:8080", True),
        ("router:8000", "http://router:8080", True),
        ("localhost:8000", "https://chat.example.org", True),
        ("localhost:8000", "http://chat.example.org", False),
        ("localhost:8000", "http://evil.example", False),
        ("localhost:8000", "http://203.0.113.9", False),
        ("localhost:8000", "null", False),
        ("localhost:8000", "http://[", False),
        ("localhost:8000", "\xff", False),
    ],
)
def test_pages_of_other_sites_send_nothing(host: str, origin: str, passes: bool):
    refusal = Hosts("127.0.0.1:8000", ALLOWED, ["https://chat.example.org"]).refusal(host, origin)
    assert (None if refusal is None else refusal[0]) == (None if passes else HTTPStatus.FORBIDDEN)
    assert Hosts("127.0.0.1:8000", ALLOWED, ["*"]).refusal(host, origin) is None
