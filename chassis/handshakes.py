"""TLS handshakes of a server that counts its connections: one that is under way is one of them.

A server of asyncio's makes a handshake before its protocol hears of the connection, and never tells it of one that
fails. So a connection is taken without TLS here, counted, and its socket given to the call that says how it ends.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, cast

REFUSED_SECONDS = 1.0
"""How long a connection that is one too many may take to ask, and for its handshake, so that it hears why."""
MAX_REFUSED = 256
"""So many of those at once are heard; further ones are closed without a word."""


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
        make: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        seconds: float,
        connections: set[Any],
        max_connections: int,
    ) -> None:
        self._make, self._tls, self._seconds = make, tls, seconds
        self._connections, self._max_connections = connections, max_connections
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection's socket out of its transport, before that reads."""
        num_refused = len(self._connections) + 1 - self._max_connections
        taken = _copied(transport) if num_refused <= MAX_REFUSED else None
        if taken is not None:
            self._connections.add(self)
            seconds = self._seconds if num_refused <= 0 else min(self._seconds, REFUSED_SECONDS)
            self._task = asyncio.create_task(self._shake_hands(taken, seconds), name="TLS handshake")
        cast("asyncio.Transport", transport).abort()

    def shutdown(self) -> None:
        """End it; uvicorn asks its connections to."""
        if self._task is not None:
            self._task.cancel()

    async def _shake_hands(self, taken: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                partial(_Behind, self._over), taken, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError:  # it has failed, and the connection is closed
            pass
        finally:
            self._connections.discard(self)

    def _over(self) -> asyncio.Protocol:
        self._connections.discard(self)
        return self._make()


def _copied(transport: asyncio.BaseTransport) -> socket.socket | None:
    """Return a transport's socket under a descriptor of its own; None: there is none left."""
    try:
        return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    except OSError:
        return None


class _Behind(asyncio.Protocol):
    """Makes way for the protocol of a connection once its handshake is over."""

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
