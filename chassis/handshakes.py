"""TLS handshakes of a server that counts its connections: one that is under way is one of them.

A server of asyncio's makes a handshake before its protocol sees the connection, and reports none that fails. So a
connection is taken without TLS here, counted, and upgraded by the loop's `start_tls`. The transport beneath stays
known: what a client leaves unread waits there, and TLS's own transport does not count it.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, cast

from lorrery.chassis.http_upgrades import UpgradeBlindProtocol

REFUSED_SECONDS = 1.0
"""How long a connection over the limit may take for its handshake and its request, to be answered with the reason."""
MAX_REFUSED = 256
"""Connections over the limit that are answered at one time; further ones are closed at once."""


class Handshake(asyncio.Protocol):
    """A connection whose handshake is under way.

    Args:
        make: returns the protocol of the connection behind it.
        tls: of the server.
        seconds: how long it may take.
        connections: of the server, open ones and those under way.
        max_connections: most of them.
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
        self._received: list[bytes] = []  # before TLS has taken over, or before the protocol behind it has

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and begin."""
        self._plain = cast("asyncio.Transport", transport)
        num_refused = len(self._connections) + 1 - self._max_connections
        if num_refused > MAX_REFUSED:
            self._plain.abort()
            return
        self._connections.add(self)
        seconds = self._seconds if num_refused <= 0 else min(self._seconds, REFUSED_SECONDS)
        self._task = asyncio.create_task(self._shake_hands(seconds), name="TLS handshake")
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._pass_on)  # behind the calls by which start_tls begins

    def data_received(self, data: bytes) -> None:
        """Keep what comes too early."""
        self._received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        self._connections.discard(self)

    def shutdown(self) -> None:
        """End it; uvicorn asks its connections to."""
        self._connections.discard(self)
        self._plain.abort()  # upon which the task ends

    async def _shake_hands(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._plain.is_closing():
            return
        try:
            transport = await loop.start_tls(
                self._plain, self, self._tls, server_side=True, ssl_handshake_timeout=seconds
            )
        except OSError:  # it has failed, and the connection is closed
            return
        finally:
            self._connections.discard(self)
        if transport is None or transport.is_closing():  # None: uvloop's of a connection that has been lost
            return
        protocol = self._make()
        protocol.beneath = self._plain
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._received:
            protocol.data_received(data)

    def _pass_on(self) -> None:
        """Give TLS what was read before it began; uvloop reads a connection at once."""
        received, self._received = memoryview(b"".join(self._received)), []
        protocol = cast("asyncio.BufferedProtocol", self._plain.get_protocol())
        while received and not self._plain.is_closing():
            buffer = cast("memoryview", protocol.get_buffer(len(received)))
            num_bytes = min(len(buffer), len(received))
            buffer[:num_bytes] = received[:num_bytes]
            protocol.buffer_updated(num_bytes)
            received = received[num_bytes:]
