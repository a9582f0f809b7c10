"""An HTTP/1.1 connection: one request at a time, with the body passed on as it arrives.

httptools parses, in C; this module dispatches its callbacks. An idle connection is reused, but not for long: servers
close idle ones (uvicorn after 5 s), and a request that meets such a close would look like a failure of the server.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

import httptools

_REUSE_SECONDS = 2.0
"""Idle time after which a connection is not reused."""


class ConnectionLostError(Exception):
    """The connection ended before the answer did, or the data is not HTTP."""


class Response:
    """What has been received of one answer.

    Attributes:
        status: 0 until it is known.
        headers: names in lower case; of several with one name the last.
        ended: set when the answer is complete, or raises `ConnectionLostError`.
    """

    __slots__ = ("body", "ended", "headers", "on_body", "status")

    def __init__(self, on_body: "Callable[[Response, bytes], None]") -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.on_body = on_body
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Connection(asyncio.Protocol):
    """One connection; `httptools` calls its `on_...` methods."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._lives_on = False
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it can be reused for another request."""
        return self._transport is not None and not self._transport.is_closing() and self._lives_on

    def send(self, request: bytes, response: Response) -> None:
        """Send a request, whose answer goes to `response`.

        Raises:
            ConnectionLostError: the connection is closed.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLostError("the connection was closed before the request")
        self._response, self._parser, self._lives_on = response, httptools.HttpResponseParser(self), False
        self._transport.write(request)

    def close(self) -> None:
        """Close the connection and abandon any request on it."""
        self._response = None
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport has no common base class

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._parser is None or self._response is None:
            self.close()  # no request is open
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def eof_received(self) -> None:
        """See `asyncio.Protocol`."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        response = self._response
        if response is not None and response.status and _ends_with_connection(response.headers):
            self.on_message_complete()
        self._fail(f"connection lost: {exc}" if exc else "the server closed the connection")
        self._transport = None

    def _fail(self, why: str) -> None:
        response, self._response = self._response, None
        if response is not None and not response.ended.done():
            response.ended.set_exception(ConnectionLostError(why))
        if self._transport is not None:
            self._transport.abort()

    # --- httptools' --------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        if self._response is not None:
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Store the status."""
        if self._response is not None and self._parser is not None:
            self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        if self._response is not None:
            self._response.on_body(self._response, body)

    def on_message_complete(self) -> None:
        """Complete the answer; an interim one (100 Continue) does not count."""
        response = self._response
        if response is None or self._parser is None or 100 <= response.status < 200:
            return
        self._response = None
        self._lives_on = self._parser.should_keep_alive()
        if not response.ended.done():
            response.ended.set_result(None)


def _ends_with_connection(headers: Mapping[str, str]) -> bool:
    return "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "")


class Pool:
    """Connections to one server.

    Args:
        host: name or address.
        port: of it.
        tls: None: plain text.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()

    async def take(self) -> Connection:
        """Return a connection for one request.

        Raises:
            OSError: the server cannot be reached.
        """
        while self._idle:
            connection = self._idle.pop()  # the most recently used
            if connection.is_open and time.monotonic() - connection.idle_since < _REUSE_SECONDS:
                return connection
            self.discard(connection)
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._host, self._port, ssl=self._tls, server_hostname=self._host if self._tls else None
        )
        self._all.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection after a complete answer, if it stays open."""
        if connection.is_open:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            self.discard(connection)

    def discard(self, connection: Connection) -> None:
        """Close a connection."""
        connection.close()
        self._all.discard(connection)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()
