"""A name server for tests: answers over UDP on a loopback port what a test says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

Address = tuple[str, int]


class NameServer(asyncio.DatagramProtocol):
    """Knows the addresses of some names; of any other it says that there is no such name.

    Attributes:
        addresses: of each name, IPv4 and IPv6; may change at any time.
        answers: whether it answers at all.
        num_asked: questions so far.
    """

    def __init__(self) -> None:
        self.addresses: dict[str, Sequence[str]] = {}
        self.answers = True
        self.num_asked = 0
        self.port = 0
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: Address) -> None:
        self.num_asked += 1
        if not self.answers:
            return
        question = dns.message.from_wire(data)
        response = dns.message.make_response(question)
        response.flags |= dns.flags.AA | dns.flags.RA
        asked = question.question[0]
        addresses = self.addresses.get(asked.name.to_text(omit_final_dot=True))
        if addresses is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        else:
            wanted = [one for one in addresses if (":" in one) == (asked.rdtype == dns.rdatatype.AAAA)]
            if wanted:
                kind = dns.rdatatype.to_text(asked.rdtype)
                response.answer.append(dns.rrset.from_text(asked.name, 1, "IN", kind, *wanted))
        self._transport.sendto(response.to_wire(), addr)

    def target(self, name: str, port: int) -> str:
        """Return what a setting says to ask this server."""
        return f"dns://127.0.0.1:{self.port}/{name}:{port}"


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """Run a name server on a free port."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    server.port = transport.get_extra_info("sockname")[1]
    try:
        yield server
    finally:
        transport.close()
