"""The HTTP listener, in the router's own event loop; enforces limits before a route sees a request.

uvicorn handles the protocol (`service.web.server`), within the bounds of connection.py.
"""

import re
from collections.abc import Iterable
from http import HTTPStatus
from time import perf_counter
from uuid import uuid4

from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorrery.router.edges.anthropic.routes import as_anthropic_has_it
from lorrery.router.handler import Handler
from lorrery.router.http.answer import WRITER
from lorrery.router.http.app import make_app
from lorrery.router.http.connection import DirectWriter, connection_class, given_request_id, in_no_chunks
from lorrery.router.http.edge import REQUEST_ID
from lorrery.router.http.errors import body, json_response
from lorrery.router.tracing import CallTrace, CallTraces
from lorrery.service.network.tls import server_contexts
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.series import Exporter, Series, table
from lorrery.service.web.hosts import Hosts
from lorrery.service.web.server import WebServer

_log = get_logger("router.http")

_NOT_IN_HEADER = re.compile("[^ -~]")
"""What a request id from a body may have, and a header may not."""

_JSON_BYTES_PER_BYTE = 6
"""JSON may encode one byte as `\\u0000`."""


_HIGHR_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0),
    60.0,
)
REQUESTS = Series(
    "http_requests_total",
    "requests",
    "HTTP requests answered, by route, method and status class.",
    ("handler", "method", "status"),
    more="`handler` is the route's path, or `none`; `status` is `2xx`, `4xx` or `5xx`. The routes that generate exist"
    " from the start, others appear with their first request. `/metrics`, `/load`, `/version` and the probes are not"
    " counted.",
)
DURATION = Series(
    "http_request_duration_seconds",
    "wall seconds",
    "From the head of an HTTP request to the end of its response, including a stream's, by route and method.",
    ("handler", "method"),
    (0.1, 0.5, 1.0),
)
DURATION_HIGHR = Series(
    "http_request_duration_highr_seconds",
    "wall seconds",
    "The same over all routes together, in more buckets.",
    buckets=_HIGHR_BUCKETS,
)
REQUEST_SIZE = Series(
    "http_request_size_bytes",
    "bytes",
    "Length of the bodies of HTTP requests as their headers say, 0 where they do not, by route.",
    ("handler",),
    is_summary=True,
)
RESPONSE_SIZE = Series(
    "http_response_size_bytes",
    "bytes",
    "Length of the bodies of responses as their headers say, 0 where they do not, as in a stream, by route.",
    ("handler",),
    is_summary=True,
)
TABLE = table(globals())

_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_NOT_COUNTED = frozenset({"/metrics", "/load", "/version", "/health", "/healthz", "/ping"})


class RequestsCounted:
    """Counts HTTP requests under the names of prometheus-fastapi-instrumentator, which vLLM's server uses.

    Routes that serve clients are counted; routes that are polled every few seconds (metrics, health) are not.

    Args:
        registry: where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        exporter = Exporter(registry, TABLE)
        self._requests = exporter.numbers(REQUESTS)
        self._duration = exporter.histograms(DURATION)
        self._duration_highr = exporter.histogram(DURATION_HIGHR)
        self._request_size = exporter.summaries(REQUEST_SIZE)
        self._response_size = exporter.summaries(RESPONSE_SIZE)
        for handler in _GENERATING:
            self._duration.labels(handler, "POST")
            self._request_size.labels(handler)
            self._response_size.labels(handler)
            for status in ("2xx", "4xx", "5xx"):
                self._requests.labels(handler, "POST", status)

    def ended(
        self, handler: str | None, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count a request.

        Args:
            handler: path of its route; None: no route.
            method: such as `POST`.
            status: of the response.
            seconds: from the request's head to the end of the response.
            request_bytes: length of its body, as its head says; 0: it does not.
            response_bytes: the same of the response.
        """
        if handler in _NOT_COUNTED:
            return
        name = handler or "none"
        self._requests.labels(name, method, f"{status // 100}xx").inc()
        self._duration.labels(name, method).observe(seconds)
        self._duration_highr.observe(seconds)
        self._request_size.labels(name).observe(request_bytes)
        self._response_size.labels(name).observe(response_bytes)


def make_server(handler: Handler, registry: CollectorRegistry, address: str) -> WebServer:
    """Return the HTTP edge.

    Args:
        handler: performs the operations.
        registry: shown by `/metrics`.
        address: HOST:PORT to listen on; port 0 takes a free one.
    """
    max_bytes = _JSON_BYTES_PER_BYTE * handler.receive_bytes
    settings, router = handler.settings, handler.settings.router
    contexts = server_contexts(settings.http_tls, settings.http_tls_section)
    # No page has a key, and no browser accepts a certificate for another name.
    any_name = handler.access.counts or contexts is not None
    allowed, origins = (("*",), ("*",)) if any_name else (settings.allowed_hosts, router.http_allowed_origins)
    return WebServer(
        bounded(make_app(handler, registry), max_bytes, handler.traces, RequestsCounted(registry)),
        address,
        "router.http",
        tls=None if contexts is None else contexts.current,
        handshake_seconds=router.http_request_seconds,
        max_connections=router.http_max_connections,
        http=connection_class(router, max_bytes, Hosts(address, allowed, origins)),
        timeout_keep_alive=router.http_idle_seconds,
    )


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the length of a body as its headers say; 0: they do not."""
    return int(next((value for name, value in headers if name == b"content-length"), b"0"))


def bounded(app: ASGIApp, max_bytes: int, traces: CallTraces, counted: RequestsCounted) -> ASGIApp:
    """Return an app that reads at most `max_bytes` of a request's body, and answers 413 to a longer one.

    Every response has an `x-request-id`: the client's, or a generated one. Requests are traced and counted here.
    """
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    text = f"the body has more than {max_bytes} bytes; send less"
    too_long = as_anthropic_has_it(json_response(body(status, text), status, {"connection": "close"}))
    app = as_anthropic_has_it(app)

    async def bounded_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        begun, status_sent, response_bytes = perf_counter(), 0, 0
        scope["state"][REQUEST_ID] = given_request_id(scope["headers"]).decode("latin-1") or uuid4().hex
        scope["state"][WRITER] = DirectWriter(send)
        if scope["http_version"] == "1.0":
            send = in_no_chunks(send)

        async def send_with_id(message: Message) -> None:
            nonlocal status_sent, response_bytes
            if message["type"] == "http.response.start":
                status_sent = message["status"]
                if trace is not None:
                    trace.answered(message["status"], getattr(scope.get("route"), "path", None))
                response_bytes = _length(message.get("headers", ()))
                request_id: str = scope["state"][REQUEST_ID]  # a body may have set it
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", _NOT_IN_HEADER.sub("?", request_id).encode()),
                ]
            await send(message)

        num_bytes = 0

        async def bounded_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                # The only kind that FastAPI passes on from within a body.
                raise HTTPException(status, text, {"connection": "close"})
            return message

        trace: CallTrace | None = None
        announced = _length(scope["headers"])
        try:
            if announced > max_bytes:
                await too_long(scope, receive, send_with_id)
                return
            with traces.http(scope) as trace:
                await app(scope, bounded_receive, send_with_id)
        except Exception:  # already answered; uvicorn would print a traceback between the log lines
            _log.exception("http_failed", path=scope["path"])
        finally:
            if status_sent:
                handler = getattr(scope.get("route"), "path", None)
                seconds = perf_counter() - begun
                counted.ended(handler, scope["method"], status_sent, seconds, announced, response_bytes)

    return bounded_app
