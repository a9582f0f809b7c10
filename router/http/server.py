"""Listens for HTTP, in the router's own loop, and keeps clients within bounds before a route sees anything of theirs.

uvicorn does the protocol, within the bounds of connection.py. What it would do to the process (signals, logs, the loop)
stays with the chassis.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from http import HTTPStatus
from uuid import uuid4

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorrery.chassis.log import get_logger
from lorrery.chassis.server import dialable, listening_socket
from lorrery.chassis.tls import server_context
from lorrery.router.handler import Handler
from lorrery.router.http.answer import WRITER
from lorrery.router.http.app import make_app
from lorrery.router.http.connection import DirectWriter, connection_class
from lorrery.router.http.edge import REQUEST_ID
from lorrery.router.http.errors import BODY_TOO_LONG, body, json_response
from lorrery.router.tracing import CallTrace, CallTraces

_log = get_logger("router.http")

_JSON_BYTES_PER_BYTE = 6
"""JSON may spell one byte as `\\u0000`."""
_SEND_BUFFER_BYTES = 1 << 17
"""What the kernel takes for a reader that has stopped; by itself it would let that grow to megabytes."""
_CLOSE_SECONDS = 1
"""How long connections may take to end once the router stops."""


class HttpServer:
    """See the module.

    Args:
        handler: answers.
        registry: what `/metrics` shows.
        address: HOST:PORT to listen at; port 0 takes a free one.
    """

    def __init__(self, handler: Handler, registry: CollectorRegistry, address: str) -> None:
        self._address = address
        max_bytes = _JSON_BYTES_PER_BYTE * handler.receive_bytes
        router, tls = handler.settings.router, server_context(handler.settings.http_tls)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it has a line for each request that is none
        config = uvicorn.Config(
            bounded(make_app(handler, registry), max_bytes, handler.traces),
            http=connection_class(router, max_bytes),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=router.http_idle_seconds,  # type: ignore[arg-type]  # a number of seconds, whole or not
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        self._server = _Server(config)
        self._socket: socket.socket | None = None

    def listen(self) -> str:
        """Take the address, and return it as it can be dialled.

        Raises:
            LorreryError: it cannot be taken.
        """
        self._socket = listening_socket("router.http", self._address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # accepted ones inherit it
        return dialable(self._address, self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serve until cancelled."""
        assert self._socket is not None
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="uvicorn")
        try:
            await asyncio.shield(serving)
        finally:
            self._server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def bounded(app: ASGIApp, max_bytes: int, traces: CallTraces) -> ASGIApp:
    """Return an app that reads no more than `max_bytes` of a request's body, and answers 413 to a longer one.

    Every answer has an `x-request-id`: the client's, or one of ours. What a request brings about is traced here.
    """
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    text = f"the body has more than {max_bytes} bytes; send less"
    too_long = json_response(body(status, text, BODY_TOO_LONG), status, {"connection": "close"})

    async def bounded_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = request_id or uuid4().hex.encode()
        scope["state"][REQUEST_ID] = request_id.decode("latin-1")
        scope["state"][WRITER] = DirectWriter(scope, send)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if trace is not None:
                    trace.answered(message["status"], getattr(scope.get("route"), "path", None))
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        trace: CallTrace | None = None
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if int(announced) > max_bytes:
            await too_long(scope, receive, send_with_id)
            return
        num_bytes = 0

        async def bounded_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise HTTPException(status, text)  # the one kind that FastAPI passes on from within a body
            return message

        try:
            with traces.http(scope) as trace:
                await app(scope, bounded_receive, send_with_id)
        except Exception:  # the client has had its answer; uvicorn would put a traceback between the log's lines
            _log.exception("http_failed", path=scope["path"])

    return bounded_app
