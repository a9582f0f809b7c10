"""What a connection does before its first request: TLS handshakes that count as connections, and offers of an upgrade.

asyncio's servers complete the handshake before the protocol sees the connection, and report no failed one. So a
connection is accepted without TLS here, counted, and upgraded with the loop's `start_tls`. The underlying transport
stays accessible: data that a client leaves unread is buffered there, and TLS's own transport does not count it.

TLS takes 50 KB of memory for a connection, and its answer to a client's first message a signature: half a millisecond
of the event loop with an elliptic curve, five with RSA of 4096 bits. So TLS begins when that message has arrived, in
one connection per iteration of the loop, and at most `MAX_UNDER_WAY` handshakes wait for a client after that.

No server here accepts an upgrade, so the offer is ignored (RFC 9110, 7.8). Java's HttpClient offers `h2c` with each
request over http://. llhttp ends such a request after its head and parses its body as the next request; uvicorn leaves
it at that, so a body could smuggle a request past a proxy. Here the head is rewritten without the offer, and a new
parser reads it and what follows.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lorrery.service.tasks import Turns


class UpgradeBlindProtocol(HttpToolsProtocol):
    """uvicorn's connection, which ignores upgrades. `CONNECT`, which would open a tunnel, is not a valid request here.

    Attributes:
        beneath: the transport that TLS writes to; None: no TLS.
    """

    beneath: asyncio.Transport | None = None

    @property
    def unread_bytes(self) -> int:
        """Bytes written but not taken by the client; TLS's transport does not count those of the one beneath it."""
        num_bytes = self.transport.get_write_buffer_size()
        return num_bytes if self.beneath is None else num_bytes + self.beneath.get_write_buffer_size()

    @property
    def is_answering(self) -> bool:
        """Whether the response to a complete request is still being sent."""
        cycle = self.cycle
        comes = cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body)
        return comes or len(self.pipeline) > 0 or self.unread_bytes > 0

    def data_received(self, data: bytes) -> None:
        """Parse received data; `send_400_response` is called if it is not a request."""
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head will be parsed again."""
        if not self.offers_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request, unless its head will be parsed again."""
        if not self.offers_upgrade():
            super().on_message_complete()

    def offers_upgrade(self) -> bool:
        """Return whether the head offers an upgrade, so that the parser stops and the head has to be parsed again.

        Raises:
            ValueError: it asks for a tunnel; the parser turns this into an error of its own.
        """
        if not self.parser.should_upgrade():
            return False
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("CONNECT")
        return True

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                (head_end,) = upgrade.args
                version = self.parser.get_http_version()
                data = head_without_upgrade(self.parser.get_method(), self.url, version, self.headers) + data[head_end:]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            else:
                return


def head_without_upgrade(method: bytes, target: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request without its `upgrade` headers.

    Args:
        method: such as `b"POST"`.
        target: as the client wrote it.
        version: of HTTP, such as `"1.1"`.
        headers: names in lower case, and values, as parsed.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])


REFUSED_SECONDS = 1.0
"""How long a connection over the limit may take for handshake and request, to be answered with the reason."""
MAX_REFUSED = 256
"""Connections over the limit that are answered concurrently; further ones are closed at once."""
MAX_UNDER_WAY = 1000
"""Handshakes that wait for a client's second message; with more, the oldest is closed."""
HELLO_BYTES = 1 << 13
"""Upper bound on a client's first message, whose usual size is 0.3 to 2 kB."""
_HANDSHAKE_RECORD = 22
_RECORD_HEAD_BYTES = 5


class Handshakes:
    """The handshakes of a server; call it for the protocol of a new connection.

    Args:
        make: returns the protocol of a connection after its handshake.
        tls: returns the context for a new connection.
        seconds: how long a handshake may take.
        connections: the server's connections, handshakes included.
        max_connections: limit on their number.
    """

    def __init__(
        self,
        make: Callable[[], UpgradeBlindProtocol],
        tls: Callable[[], ssl.SSLContext],
        seconds: float,
        connections: set[Any],
        max_connections: int,
    ) -> None:
        self.make, self.tls, self.seconds = make, tls, seconds
        self.connections, self.max_connections = connections, max_connections
        self.turns = Turns()
        self.under_way: dict[Handshake, None] = {}

    def __call__(self) -> "Handshake":
        """Return the protocol of a new connection."""
        return Handshake(self)


class Handshake(asyncio.Protocol):
    """A connection whose handshake is not complete.

    Args:
        server: that it belongs to.
    """

    def __init__(self, server: Handshakes) -> None:
        self._server = server
        self._received = b""  # before TLS, or the protocol after it, has taken over
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        server, self._plain = self._server, cast("asyncio.Transport", transport)
        num_refused = len(server.connections) + 1 - server.max_connections
        if num_refused > MAX_REFUSED:
            self._plain.abort()
            return
        server.connections.add(self)
        seconds = server.seconds if num_refused <= 0 else min(server.seconds, REFUSED_SECONDS)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._plain.abort)

    def data_received(self, data: bytes) -> None:
        """Begin the handshake once the client's first message is there."""
        self._received += data
        if self._task is not None:
            return
        if self._received[0] != _HANDSHAKE_RECORD or len(self._received) > HELLO_BYTES:
            self._plain.abort()
        elif len(self._received) >= _RECORD_HEAD_BYTES + int.from_bytes(self._received[3:_RECORD_HEAD_BYTES]):
            self._plain.pause_reading()
            self._task = asyncio.create_task(self._shake_hands(), name="TLS handshake")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._uncount()

    def shutdown(self) -> None:
        """Abort the handshake; uvicorn calls this on its connections."""
        self._uncount()
        self._plain.abort()  # which ends the task

    def _uncount(self) -> None:
        self._server.connections.discard(self)
        self._server.under_way.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    async def _shake_hands(self) -> None:
        server, loop = self._server, asyncio.get_running_loop()
        try:
            await server.turns.next()
            if self._plain.is_closing():
                return
            if len(server.under_way) >= MAX_UNDER_WAY:
                next(iter(server.under_way)).shutdown()
            server.under_way[self] = None
            loop.call_soon(loop.call_soon, self._pass_on)  # after the calls with which start_tls begins
            transport = await loop.start_tls(
                self._plain, self, server.tls(), server_side=True, ssl_handshake_timeout=server.seconds
            )
        except OSError:  # the handshake failed, and the connection is closed
            return
        finally:
            self._uncount()
        if transport is None or transport.is_closing():  # uvloop returns None for a lost connection
            return
        protocol = server.make()
        protocol.beneath = self._plain
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._received:
            protocol.data_received(self._received)

    def _pass_on(self) -> None:
        """Pass data that was read before the handshake to TLS; uvloop reads a connection at once."""
        received, self._received = memoryview(self._received), b""
        protocol = cast("asyncio.BufferedProtocol", self._plain.get_protocol())
        while received and not self._plain.is_closing():
            buffer = cast("memoryview", protocol.get_buffer(len(received)))
            num_bytes = min(len(buffer), len(received))
            buffer[:num_bytes] = received[:num_bytes]
            protocol.buffer_updated(num_bytes)
            received = received[num_bytes:]
