"""Targets: addresses, and names that stand for some."""

import pytest

from lorrery.service.network.targets import DnsName, parse_name


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("10.0.0.1:50052", None),
        ("[::1]:50052", None),
        ("scheduler:50052", None),
        ("dns:///schedulers:50052", DnsName("schedulers", 50052)),
        ("dns://10.0.0.9/schedulers.ns.svc:50052", DnsName("schedulers.ns.svc", 50052, "10.0.0.9", 53)),
        ("dns://127.0.0.1:8600/s.service.consul:1", DnsName("s.service.consul", 1, "127.0.0.1", 8600)),
        ("dns://[::1]:8600/s:1", DnsName("s", 1, "::1", 8600)),
        ("dns://[::1]/s:1", DnsName("s", 1, "::1", 53)),
        ("dns://::1/s:1", DnsName("s", 1, "::1", 53)),
        ("dns://10.0.0.9/schedulers.test.:7", DnsName("schedulers.test", 7, "10.0.0.9", 53)),
        (f"dns:///{'x' * 63}.test:7", DnsName(f"{'x' * 63}.test", 7)),
    ],
)
def test_a_target_is_an_address_or_a_name(target: str, name: DnsName | None) -> None:
    assert parse_name(target) == name


@pytest.mark.parametrize(
    "target",
    ["dns:schedulers:1", "dns:///schedulers", "dns:///schedulers:0", "dns:///schedulers:70000", "dns:///a b:1"],
)
def test_a_name_without_host_or_port_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="dns:///NAME:PORT"):
        parse_name(target)


@pytest.mark.parametrize(
    "server", ["dns.example", "127.0.0.1:x", "127.0.0.1:99999", "127.0.0.1:-5", "[::1]:0", "1.2.3", "[::1"]
)
def test_a_name_server_is_an_ip_address(server: str) -> None:
    with pytest.raises(ValueError, match="must be an IP address"):
        parse_name(f"dns://{server}/schedulers:1")


@pytest.mark.parametrize("name", ["a..b", ".a", ".", "x" * 64 + ".test", ".".join(["x" * 49] * 6)])
def test_a_name_that_cannot_be_asked_for_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 63 characters"):
        parse_name(f"dns:///{name}:7")
