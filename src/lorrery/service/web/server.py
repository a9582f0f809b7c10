"""An HTTP server: uvicorn's protocol without its effects on the process (signals, logs, the loop).

A request must arrive within `REQUEST_SECONDS`, and at most `MAX_CONNECTIONS` connections may be open; a client over the
limit gets an error as its response, and is disconnected. uvicorn has no such limits. Passing `http` among the options
replaces the protocol by one with its own limits.

Connections whose clients may still be sending are closed without losing the last response. Closing a socket while data
arrives resets the connection, and the client's system drops what it has not read yet. So the connection is closed in
stages (RFC 9112, 9.6): first the sending direction, then, once the client has closed its own, the whole. Data that
arrives meanwhile is read and dropped, up to a bound on time and bytes; nginx bounds the time only. TLS has no
half-close here: the client recognises the end of the response by its length.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from lorrery.service.network.server import at_port, listening_socket
from lorrery.service.telemetry.metrics import MAX_HEAD_BYTES
from lorrery.service.web.handshakes import REFUSED_SECONDS, Handshakes, UpgradeBlindProtocol
from lorrery.service.web.hosts import Hosts, named_in

REQUEST_SECONDS = 30.0
"""From the start of the connection, or the first byte after a previous request, to the last byte of a request."""
MAX_CONNECTIONS = 256
"""A browser opens up to six for a page."""
_MAX_AHEAD = 8
"""Requests that may wait behind another on their connection; no browser sends any."""
_LINGER_BYTES = 1 << 24
"""Bytes that a refused client may still send; it gets its response once it stops."""
_SEND_BUFFER_BYTES = 1 << 17
"""Kernel buffer for a reader that has stopped; by default it would grow to megabytes."""
_LOOK_SECONDS = 0.02
"""Poll interval of `WebServer.answered`."""
_CLOSE_SECONDS = 1
"""How long connections may take to end once the server stops."""


class WebServer:
    """Serves an app in the loop that runs it.

    Args:
        app: an ASGI application.
        address: HOST:PORT to listen on; port 0 takes a free one.
        setting: origin of `address`, for messages.
        tls: returns the context for a new connection; None: plain text.
        handshake_seconds: how long a TLS handshake may take.
        max_connections: limit to which TLS handshakes count; the given protocol refuses connections over it.
        options: further options of uvicorn.
    """

    def __init__(
        self,
        app: ASGIApp,
        address: str,
        setting: str,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        handshake_seconds: float = REQUEST_SECONDS,
        max_connections: int = MAX_CONNECTIONS,
        **options: Any,  # noqa: ANN401  uvicorn checks them
    ) -> None:
        self._address, self._setting = address, setting
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it has a line for each request that is none
        config = uvicorn.Config(
            app,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            **{"http": _Connection, **options},
        )
        self._server = _Server(config, tls, handshake_seconds, max_connections)
        self._socket: socket.socket | None = None

    def listen(self) -> str:
        """Take the address, and return it with the actual port.

        Raises:
            LorreryError: it cannot be taken.
        """
        self._socket = listening_socket(self._setting, self._address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # accepted ones inherit it
        return at_port(self._address, self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serve until cancelled."""
        assert self._socket is not None
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="uvicorn")
        try:
            await asyncio.shield(serving)
        finally:
            self._server.should_exit = True
            await serving

    async def answered(self) -> None:
        """Return once no answer is being written, nor waits for its reader.

        It has no time limit; a caller that stops gives it one. A reader that has stopped is cut where the server's
        protocol does so (`router.http.stuck_reader`). No event says that a transport's buffer is empty, so it polls.
        """
        connections = self._server.server_state.connections
        while any(  # noqa: ASYNC110  see above
            isinstance(one, UpgradeBlindProtocol) and one.is_answering for one in connections
        ):
            await asyncio.sleep(_LOOK_SECONDS)


def guarded(app: ASGIApp, hosts: Hosts) -> ASGIApp:
    """Return an app that answers requests of wrong names, or from other sites, in plain text."""

    async def guarded_app(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = hosts.refusal(*named_in(scope["headers"]))
        await (app if refusal is None else PlainTextResponse(f"{refusal[1]}\n", refusal[0]))(scope, receive, send)

    return guarded_app


class _Connection(UpgradeBlindProtocol):
    """uvicorn's connection, closed if a request does not arrive in time, or if there are too many connections."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._may_be_sending = False
        self._in_head, self._head_bytes = False, 0  # of the request being received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._closing = LingeringTransport(
            cast("asyncio.Transport", transport),
            self.loop,
            lambda: self._may_be_sending,
            REFUSED_SECONDS,
            _LINGER_BYTES,
        )
        super().connection_made(self._closing)  # type: ignore[arg-type]
        self._refused = len(self.connections) > MAX_CONNECTIONS
        self._expect(REFUSED_SECONDS if self._refused else REQUEST_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_timer()
        self._closing.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing.lingers:
            self._closing.drop(data)
            return
        if self._refused:
            text = f"{MAX_CONNECTIONS} connections are open, and no more are taken; close some, or try later"
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, text)
            return
        super().data_received(data)  # ends the wait for a next request
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            text = f"the head of the request has more than {MAX_HEAD_BYTES} bytes; send less"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
        if self._timer is None and self.cycle.response_complete and not self.transport.is_closing():
            self._expect(REQUEST_SECONDS)

    def send_400_response(self, msg: str) -> None:
        self._may_be_sending = True
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        self._may_be_sending = self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_AHEAD:
            raise OverflowError  # the parser turns it into a call of send_400_response
        self._in_head = self.offers_upgrade()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.offers_upgrade():
            self._may_be_sending = False
            self._unset_timer()
        super().on_message_complete()

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        if not self.transport.is_closing():
            self._may_be_sending = True
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain\r\n"
            head += f"content-length: {len(text) + 1}\r\nconnection: close\r\n\r\n"
            self.transport.write(f"{head}{text}\n".encode())
            self.transport.close()

    def _expect(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves the process's signals alone, and bounds TLS handshakes.

    Args:
        config: of uvicorn.
        tls: see `WebServer`.
        handshake_seconds: how long a TLS handshake may take.
        max_connections: among which they count.
    """

    def __init__(
        self,
        config: Config,
        tls: Callable[[], ssl.SSLContext] | None,
        handshake_seconds: float,
        max_connections: int,
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._handshake_seconds, self._max_connections = handshake_seconds, max_connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; uvicorn's own does not bound handshakes."""
        config, loop = self.config, asyncio.get_running_loop()

        def connection() -> UpgradeBlindProtocol:
            make = cast("type[UpgradeBlindProtocol]", config.http_protocol_class)
            return make(config, self.server_state, self.lifespan.state)

        accept: Callable[[], asyncio.Protocol] = connection
        if self._tls is not None:
            connections = self.server_state.connections
            accept = Handshakes(connection, self._tls, self._handshake_seconds, connections, self._max_connections)
        self.servers = [await loop.create_server(accept, sock=one, backlog=config.backlog) for one in sockets or ()]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class LingeringTransport:
    """A connection's transport, as far as uvicorn and the routes use it.

    Args:
        transport: of the connection.
        loop: of the transport.
        is_amid: returns whether the client may still be sending when its connection is closed.
        seconds: how long such a client may go on.
        max_bytes: how much it may send.

    Attributes:
        lingers: whether received data must go to `drop`.
    """

    __slots__ = (
        "_is_amid",
        "_loop",
        "_max_bytes",
        "_timer",
        "_transport",
        "abort",
        "get_extra_info",
        "get_write_buffer_size",
        "lingers",
        "pause_reading",
        "resume_reading",
        "seconds",
        "write",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        is_amid: Callable[[], bool],
        seconds: float,
        max_bytes: int,
    ) -> None:
        self._transport, self._loop = transport, loop
        self._is_amid = is_amid
        self.seconds, self._max_bytes = seconds, max_bytes
        self._timer: asyncio.TimerHandle | None = None
        self.lingers = False
        self.write: Callable[[bytes], None] = transport.write  # the transport's own method: called once per token
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading

    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once everything is written and, if the client may be sending, once it has stopped."""
        if self.is_closing():
            return
        if not self._is_amid():
            self._transport.close()
            return
        self.lingers = True
        self.write = _dropped
        self.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._timer = self._loop.call_later(self.seconds, self._transport.close)

    def drop(self, data: bytes) -> None:
        """Drop data received after the last response."""
        self._max_bytes -= len(data)
        if self._max_bytes < 0:
            self._transport.close()

    def end(self) -> None:
        """Clean up after the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _dropped(_: bytes) -> None:
    """Write nothing."""
