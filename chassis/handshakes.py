"""TLS handshakes of a server that limits its connections: a handshake under way counts as a connection.

asyncio's servers complete the handshake before the protocol sees the connection, and report no failed one. So a
connection is accepted without TLS here, counted, and upgraded with the loop's `start_tls`. The underlying transport
stays
accessible: data that a client leaves unread is buffered there, and TLS's own transport does not count it.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, cast

from lorrery.chassis.http_upgrades import UpgradeBlindProtocol

REFUSED_SECONDS = 1.0
"""How long a connection over the limit may take for handshake and request, to be answered with the reason."""
MAX_REFUSED = 256
"""Connections over the limit that are answered concurrently; further ones are closed at once."""


class Handshake(asyncio.Protocol):
    """A connection whose handshake is under way.

    Args:
        make: returns the protocol of the connection after the handshake.
        tls: of the server.
        seconds: how long the handshake may take.
        connections: the server's connections, handshakes included.
        max_connections: limit on their number.
    """

    def __init__(
        self,
        make: Callable[[], UpgradeBlindProtocol],
        tls: ssl.SSLContext,
        seconds: float,
        connections: set[Any],
        max_connections: int,
    ) -> None:
        self._make, self._tls, self._seconds = make, tls, seconds
        self._connections, self._max_connections = connections, max_connections
        self._received: list[bytes] = []  # before TLS, or the protocol after it, has taken over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and begin the handshake."""
        self._plain = cast("asyncio.Transport", transport)
        num_refused = len(self._connections) + 1 - self._max_connections
        if num_refused > MAX_REFUSED:
            self._plain.abort()
            return
        self._connections.add(self)
        seconds = self._seconds if num_refused <= 0 else min(self._seconds, REFUSED_SECONDS)
        self._task = asyncio.create_task(self._shake_hands(seconds), name="TLS handshake")
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._pass_on)  # after the calls with which start_tls begins

    def data_received(self, data: bytes) -> None:
        """Keep data that arrives too early."""
        self._received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._connections.discard(self)

    def shutdown(self) -> None:
        """Abort the handshake; uvicorn calls this on its connections."""
        self._connections.discard(self)
        self._plain.abort()  # which ends the task

    async def _shake_hands(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._plain.is_closing():
            return
        try:
            transport = await loop.start_tls(
                self._plain, self, self._tls, server_side=True, ssl_handshake_timeout=seconds
            )
        except OSError:  # the handshake failed, and the connection is closed
            return
        finally:
            self._connections.discard(self)
        if transport is None or transport.is_closing():  # uvloop returns None for a lost connection
            return
        protocol = self._make()
        protocol.beneath = self._plain
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._received:
            protocol.data_received(data)

    def _pass_on(self) -> None:
        """Pass data that was read before the handshake to TLS; uvloop reads a connection at once."""
        received, self._received = memoryview(b"".join(self._received)), []
        protocol = cast("asyncio.BufferedProtocol", self._plain.get_protocol())
        while received and not self._plain.is_closing():
            buffer = cast("memoryview", protocol.get_buffer(len(received)))
            num_bytes = min(len(buffer), len(received))
            buffer[:num_bytes] = received[:num_bytes]
            protocol.buffer_updated(num_bytes)
            received = received[num_bytes:]
