"""Which addresses a name has now: how services find one another without lists.

gRPC resolves names by itself, but has one channel for all their addresses; here each address is dialled by itself.

A name is asked again every few seconds, and soon after a connection was lost. IPv4 addresses count, or IPv6 where there
are none: a host that has both is one host. An answer without any, or none at all, changes nothing: a name server that
is away must not take a cluster apart.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from lorrery.chassis.log import get_logger
from lorrery.chassis.targets import DnsName, parse_name

ANSWER_SECONDS = 3.0
"""How long a name server may take."""
SYSTEM_SECONDS = 15.0
"""How long the system's resolver may take: it asks a second server when the first has not answered for 5 s."""
FIRST_SECONDS = 0.5
"""Between two looks while a name has had no address yet."""
SOON_SECONDS = 0.2
"""From the loss of a connection until its name is asked again; what is lost meanwhile is asked for together."""

_log = get_logger("discovery")


Resolve = Callable[[DnsName], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a name.

Raises:
    OSError: there are none, or they cannot be learnt now.
"""


async def resolve(name: DnsName) -> Sequence[str]:
    """See `Resolve`: from the name's own server, or as this system resolves any name."""
    return await (_ask_server(name) if name.server else _ask_system(name))


async def _ask_system(name: DnsName) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(SYSTEM_SECONDS):
        found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    by_family = {family: [str(one[4][0]) for one in found if one[0] == family] for family, *_ in found}
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or []


async def _ask_server(name: DnsName) -> Sequence[str]:
    import dns.asyncresolver  # few clusters need it
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
        every_seconds: between two looks at names.
        resolve: asks for a name's addresses.

    Attributes:
        addresses: HOST:PORT each, with the name that a certificate must have; empty: the address's own.
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
                self._of_target[target] = {}
                self._names[target] = name

    @property
    def has_names(self) -> bool:
        """Whether addresses may come and go."""
        return bool(self._names)

    @property
    def addresses(self) -> dict[str, str]:
        """See the class."""
        return {address: host for found in self._of_target.values() for address, host in found.items()}

    def look_soon(self) -> None:
        """Ask again without waiting for the time: somebody has left, or is about to."""
        self._soon.set()

    async def look(self) -> bool:
        """Ask for the addresses of all names; return whether any has come or gone."""
        before = self.addresses
        await asyncio.gather(*(self._look_at(target, name) for target, name in self._names.items()))
        return self.addresses != before

    async def run(self, on_change: Callable[[], None]) -> None:
        """Look again and again, until cancelled."""
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
        except (OSError, UnicodeError) as error:  # the latter: a name that cannot be encoded
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
