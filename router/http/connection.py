"""One HTTP connection, within bounds; uvicorn's protocol bounds neither the time nor the bytes of a request.

A request must be complete within `http_request_seconds`, counted from the start of the connection or, for a later
request, from its first byte; its head may have `MAX_HEAD_BYTES`. A slower or longer request gets an error and its
connection is closed, as are connections over `http_max_connections`. The time of a request that waits behind another on
its connection starts when its turn comes. Up to `_MAX_AHEAD` such requests are read meanwhile, so that a disconnect is
noticed. If such a request is refused, its error is sent after the responses before it. A client that stops reading its
responses is cut. A client that gets an error while it is sending may send on for a while, lest it
lose the error (service/web/server.py).

A client that has taken no data for too long is cut: a normal close would wait until it has taken what is written,
possibly for ever, and hold it in memory. The unread bytes are compared only while nothing can be added, because the
writer is paused or the response complete, so an unchanged buffer means that nothing is taken. Time is counted in
checks, so that a suspended router does not cut its clients.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, cast
from uuid import uuid4

from starlette.types import Message, Send
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from lorrery.router.http.edge import ROLES
from lorrery.router.http.errors import body
from lorrery.router.settings import RouterSettings
from lorrery.service.network.credentials import roles_in
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.metrics import MAX_HEAD_BYTES
from lorrery.service.web.handshakes import MAX_REFUSED, REFUSED_SECONDS, UpgradeBlindProtocol
from lorrery.service.web.hosts import Hosts, named_in
from lorrery.service.web.server import LingeringTransport

LOOKS = 6
TIMEOUT_LOOKS = 4
"""Checks within the time-out.

`LOOKS` is higher, so that a stream's own cut (`service.network.calls`), which has an error and is counted, comes
first.
"""

_NO_LINGER = struct.pack("ii", 1, 0)
"""Makes a close reset the connection; the kernel would otherwise keep unsent data for minutes."""

_log = get_logger("router.http")


class ReaderWatch:
    """Watches the unread output of one client.

    Args:
        transport: of the connection.
        unread_bytes: returns the bytes written that the client has not taken.
        loop: of the transport.
        timeout_seconds: how long a client may take nothing; its connection is cut after one and a half times as long.
    """

    __slots__ = ("_before_bytes", "_look_seconds", "_loop", "_num_same", "_timer", "_transport", "_unread_bytes")

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        unread_bytes: Callable[[], int],
        loop: asyncio.AbstractEventLoop,
        timeout_seconds: float,
    ) -> None:
        self._transport, self._unread_bytes, self._loop = transport, unread_bytes, loop
        self._look_seconds = timeout_seconds / TIMEOUT_LOOKS
        self._timer: asyncio.TimerHandle | None = None
        self._before_bytes = self._num_same = 0

    def begin(self) -> None:
        """Start to watch, if not watching yet; nothing more may be written until `end`."""
        if self._timer is None and (unread := self._unread_bytes()):
            self._before_bytes, self._num_same = unread, 0
            self._timer = self._loop.call_later(self._look_seconds, self._look)

    def end(self) -> None:
        """Stop watching: more may be written, or the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        unread = self._unread_bytes()
        if not unread:
            return
        self._num_same = self._num_same + 1 if unread == self._before_bytes else 0
        self._before_bytes = unread
        if self._num_same == LOOKS:
            _log.info("http_reader_stuck", unread_bytes=unread, timeout_seconds=TIMEOUT_LOOKS * self._look_seconds)
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._look_seconds, self._look)


_MAX_AHEAD = 8
_FRAMING = 2
"""A chunked body takes more bytes than it has, but less than this many times as much."""


def connection_class(settings: RouterSettings, max_body_bytes: int, hosts: Hosts) -> type[UpgradeBlindProtocol]:
    """Return the protocol class of a server's connections.

    Args:
        settings: with the limits.
        max_body_bytes: upper bound on a body.
        hosts: checks the names that requests use.
    """
    max_bytes = MAX_HEAD_BYTES + _FRAMING * max_body_bytes

    class Connection(UpgradeBlindProtocol):
        """uvicorn's protocol within the bounds of these settings."""

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
            self._in_head = True
            self._begun = False
            self._num_bytes = 0  # received since a message last ended
            self._num_messages = 0
            self._head_bytes = 0  # of the request being received
            self._wrong_head: tuple[HTTPStatus, str] | None = None  # error for the request being received
            self._last_words = b""  # sent after the responses under way; input after it is ignored
            self._running: RequestResponseCycle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._closing = LingeringTransport(
                cast("asyncio.Transport", transport),
                self.loop,
                self._may_be_sending,
                settings.reader_timeout_seconds,
                max_bytes,
            )
            super().connection_made(self._closing)  # type: ignore[arg-type]
            self._reader = ReaderWatch(
                self.transport, lambda: self.unread_bytes, self.loop, settings.reader_timeout_seconds
            )
            tls: Any = transport.get_extra_info("ssl_object")
            if tls is not None:
                self.app_state = {**self.app_state, ROLES: roles_in(tls.getpeercert())}
            num_refused = len(self.connections) - settings.http_max_connections
            self._refused = num_refused > 0
            if num_refused > MAX_REFUSED:
                self.transport.abort()
                return
            if self._refused:
                self._closing.seconds = min(REFUSED_SECONDS, self._closing.seconds)
            self._expect(REFUSED_SECONDS if self._refused else settings.http_request_seconds)

        def connection_lost(self, exc: Exception | None) -> None:
            self._unset_timer()
            self._closing.end()
            self._reader.end()
            if self._running is not None:  # uvicorn notifies the latest request only, queued behind this one
                self._running.disconnected = True
                self._running.message_event.set()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._closing.lingers:
                self._closing.drop(data)
                return
            if self._refused:
                limit = settings.http_max_connections
                text = f"{limit} connections are open; http_max_connections is {limit}; try later"
                self._end(HTTPStatus.SERVICE_UNAVAILABLE, text)
                return
            if self._last_words:
                return
            num_messages = self._num_messages
            super().data_received(data)
            if self._last_words:
                return
            self._num_bytes = self._num_bytes + len(data) if num_messages == self._num_messages else 0
            if self._in_head and self._num_bytes > MAX_HEAD_BYTES:
                self._head_too_long()
            elif self._num_bytes > max_bytes:
                self.transport.close()  # it has been answered, and keeps sending
            elif self._timer is None and not self._begun and not self._answers():
                self._expect(settings.http_request_seconds)  # blank lines before a request do not count as one

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reader.begin()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reader.end()
            if not self._answers():
                self._reader.begin()  # the remainder of a response can be below the mark at which writers are paused

        def send_400_response(self, msg: str) -> None:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._head_too_long()
            elif self._wrong_head is not None:
                self._end(*self._wrong_head)
            else:
                self._end(HTTPStatus.BAD_REQUEST, "this is no HTTP request")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._begun, self._in_head = True, True
            self._head_bytes = 0
            if self._timer is None:
                self._expect(settings.http_request_seconds)

        def on_url(self, url: bytes) -> None:
            self._head_bytes += len(url)
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:  # called for trailers too
                self._head_bytes += len(name) + len(value) + len(": \r\n")
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self.offers_upgrade():
                return
            self._wrong_head = _why_wrong(self.parser.get_http_version(), self.headers) or hosts.refusal(
                *named_in(self.headers)
            )
            if self._wrong_head is not None:
                raise ValueError
            if self._head_bytes > MAX_HEAD_BYTES:
                raise OverflowError  # the parser turns it into its own error, and that into a call of send_400_response
            super().on_headers_complete()
            self._in_head = False
            if 0 < len(self.pipeline) < _MAX_AHEAD:
                self.flow.resume_reading()

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
            self._running = cycle
            super()._start_asgi_task(cycle, app)

        def on_message_complete(self) -> None:
            if self.offers_upgrade():
                return
            self._unset_timer()
            self._begun, self._in_head = False, True
            self._num_messages += 1
            super().on_message_complete()

        def _may_be_sending(self) -> bool:
            """Return whether more of a request, or of ignored input, may arrive."""
            return self._begun or bool(self._last_words)

        def _answers(self) -> bool:
            """Return whether a received request is still unanswered."""
            return self.cycle is not None and not self.cycle.response_complete

        def _expect(self, seconds: float) -> None:
            self._timer = self.loop.call_later(seconds, self._too_slow)

        def _unset_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if self.pipeline or (self._in_head and self._answers()):
                self._expect(settings.http_request_seconds)  # the time of a queued request has not started
            elif not self._begun:
                self.transport.close()
            else:
                seconds = settings.http_request_seconds
                text = f"the request took more than {seconds:g} s to come; http_request_seconds is {seconds:g}"
                self._end(HTTPStatus.REQUEST_TIMEOUT, text)

        def _head_too_long(self) -> None:
            text = f"the head of the request has more than {MAX_HEAD_BYTES} bytes; send less"
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)

        def _end(self, status: HTTPStatus, text: str) -> None:
            """Refuse the request being received, after the responses to those before it, and close."""
            if self.transport.is_closing() or self._last_words:
                return
            self._unset_timer()
            others_wait = self._answers() if self._in_head else bool(self.pipeline)
            if not self._in_head and self.pipeline:
                self.pipeline.popleft()  # that request, of which only the head is complete
                self.cycle = self.pipeline[0][0] if self.pipeline else cast("RequestResponseCycle", self._running)
            elif not self._in_head and self.cycle.response_started:
                self.transport.close()  # its response started before its body was complete
                return
            content = json.dumps(body(status, text)).encode()
            request_id = given_request_id(self.headers) if self._begun else b""  # else the headers are another's
            self._last_words = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(content)}\r\nconnection: close\r\nx-request-id: ".encode()
                + (request_id or uuid4().hex.encode())
                + b"\r\n\r\n"
                + content
            )
            if not others_wait:
                self._close()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._answers():
                return
            if self._last_words:
                self._close()
            else:
                self._reader.begin()

        def _close(self) -> None:
            if not self.transport.is_closing():
                self.transport.write(self._last_words)
                self.transport.close()
                self._reader.begin()

    return Connection


def given_request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the id that a client gives its request; empty: none."""
    return next((value for name, value in headers if name == b"x-request-id"), b"")


def _why_wrong(version: str, headers: Sequence[tuple[bytes, bytes]]) -> tuple[HTTPStatus, str] | None:
    """Return status and text for a head that others might read otherwise (RFC 9112, 3.2 and 6.1); None: none."""
    num_hosts = 0
    for name, value in headers:
        if name == b"host":
            num_hosts += 1
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            text = f"transfer-encoding is {value.decode('latin-1')!r:.100}; chunked is the only one"
            return HTTPStatus.NOT_IMPLEMENTED, text
    if num_hosts == 1 or (num_hosts == 0 and version == "1.0"):
        return None
    return HTTPStatus.BAD_REQUEST, f"the request has {num_hosts} headers host; send one"


def in_no_chunks(send: Send) -> Send:
    """Return a `send` for HTTP/1.0, which has no chunks: a response of unknown length ends with the connection.

    Args:
        send: uvicorn's, which would send chunks.
    """
    cycle: RequestResponseCycle = cast("Any", send).__self__
    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
        if not has_length:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain


class DirectWriter:
    """The `answer.BodyWriter` of a request: writes a chunk as uvicorn's `send` would, at a fifth of the cost.

    Args:
        send: uvicorn's.
    """

    __slots__ = ("_cycle",)

    def __init__(self, send: Send) -> None:
        self._cycle: RequestResponseCycle = cast("Any", send).__self__

    @property
    def is_ready(self) -> bool:
        """See `BodyWriter`; a response without chunks is left to uvicorn."""
        cycle = self._cycle
        return cycle.chunked_encoding is True and not cycle.flow.write_paused

    def write_now(self, body: bytes) -> None:
        """See `BodyWriter`."""
        cycle = self._cycle
        if body and not cycle.disconnected:  # an empty chunk would end the response
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
