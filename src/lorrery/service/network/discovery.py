"""Resolves names to their current addresses, so that services find one another without lists.

gRPC resolves names itself, but uses one channel for all addresses of a name; here each address is dialled separately.

Names are resolved every few seconds, and soon after a connection was lost. Only IPv4 addresses count, or IPv6 if there
are none, since a host with both is one host. A failed or empty answer changes nothing: a name server that is down must
not take a cluster apart.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from lorrery.service.installed import need_extra
from lorrery.service.names import quoted
from lorrery.service.network.targets import DnsName, parse_name
from lorrery.service.telemetry.log import get_logger

ANSWER_SECONDS = 3.0
"""Timeout of a name server."""
SYSTEM_SECONDS = 15.0
"""Timeout of the system's resolver, which asks a second server after 5 s."""
FIRST_SECONDS = 0.5
"""Interval of attempts while a name has never had an address."""
SOON_SECONDS = 0.2
"""Delay from the loss of a connection to the resolution of its name; losses in that time share one resolution."""

_log = get_logger("discovery")


Resolve = Callable[[DnsName], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a name.

Raises:
    OSError: there are none, or the resolution failed.
"""


async def resolve(name: DnsName) -> Sequence[str]:
    """See `Resolve`: asks the name's own server, or the system's resolver."""
    return await (_ask_server(name) if name.server else _ask_system(name))


async def _ask_system(name: DnsName) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(SYSTEM_SECONDS):
        found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    by_family = {family: [str(one[4][0]) for one in found if one[0] == family] for family, *_ in found}
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or []


async def _ask_server(name: DnsName) -> Sequence[str]:
    import dns.asyncresolver
    import dns.exception

    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers, resolver.port = [name.server], name.server_port
    try:
        for kind in ("A", "AAAA"):
            answer = await resolver.resolve(
                f"{name.host}.", kind, lifetime=ANSWER_SECONDS, raise_on_no_answer=False, search=False
            )
            if answer.rrset is not None:
                return [record.address for record in answer.rrset]
    except dns.exception.DNSException as error:
        raise OSError(str(error)) from None
    return []


class Discovery:
    """The addresses of some targets, kept up to date by `run`.

    Args:
        targets: addresses and names.
        every_seconds: interval of resolutions.
        resolve: resolves a name.

    Raises:
        SettingsError: a target names a server, and dnspython is not installed.

    Attributes:
        addresses: HOST:PORT -> name that the certificate must have; empty: that of the address.
    """

    def __init__(self, targets: Iterable[str], every_seconds: float, resolve: Resolve = resolve) -> None:
        self._every_seconds, self._resolve = every_seconds, resolve
        self._of_target: dict[str, dict[str, str]] = {}
        self._names: dict[str, DnsName] = {}
        self._failing: set[str] = set()
        self._soon = asyncio.Event()
        for target in targets:
            name = parse_name(target)
            if name is None:
                self._of_target[target] = {target: ""}
            else:
                if name.server:
                    need_extra("dns", quoted(target))
                self._of_target[target] = {}
                self._names[target] = name

    @property
    def has_names(self) -> bool:
        """Whether addresses may change."""
        return bool(self._names)

    @property
    def addresses(self) -> dict[str, str]:
        """See the class."""
        return {address: host for found in self._of_target.values() for address, host in found.items()}

    def look_soon(self) -> None:
        """Resolve soon, before the interval is over: a peer has left, or is about to."""
        self._soon.set()

    async def look(self) -> bool:
        """Resolve all names; return whether any address has appeared or gone."""
        before = self.addresses
        await asyncio.gather(*(self._look_at(target, name) for target, name in self._names.items()))
        return self.addresses != before

    async def run(self, on_change: Callable[[], None]) -> None:
        """Resolve repeatedly, until cancelled; call `on_change` after each change."""
        while self._names:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_seconds):
                    await self._soon.wait()
                    await asyncio.sleep(SOON_SECONDS)
            self._soon.clear()
            if await self.look():
                on_change()

    @property
    def _wait_seconds(self) -> float:
        return self._every_seconds if all(self._of_target.values()) else min(FIRST_SECONDS, self._every_seconds)

    async def _look_at(self, target: str, name: DnsName) -> None:
        why = "it has no addresses"
        try:
            hosts = await self._resolve(name)
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded
            hosts, why = [], str(error) or "no answer in time"
        if not hosts:
            if target not in self._failing:
                self._failing.add(target)
                _log.warning("name_not_resolved", name=target, reason=why, known=len(self._of_target[target]))
            return
        self._failing.discard(target)
        found = {
            f"[{host}]:{name.port}" if ":" in host else f"{host}:{name.port}": name.host for host in sorted(set(hosts))
        }
        before = self._of_target[target]
        if found != before:
            came, went = sorted(found.keys() - before.keys()), sorted(before.keys() - found.keys())
            _log.info("addresses_changed", name=target, came=came, went=went)
            self._of_target[target] = found
