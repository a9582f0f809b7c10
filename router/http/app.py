"""The application: the routes of every kind of client, those of the process itself, and errors as responses."""

import asyncio
from collections.abc import Iterator
from http import HTTPStatus
from importlib import import_module
from json import dumps
from typing import Any

import grpc.aio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response

from lorrery.router.access import check_operator
from lorrery.router.edges import DIALECTS
from lorrery.router.edges.slora import KINDS
from lorrery.router.handler import Handler
from lorrery.router.http.edge import Edge
from lorrery.router.http.errors import HTTP_STATUS, body, error_response, json_response, let_go
from lorrery.service.errors import Internal, RequestError
from lorrery.service.installed import VERSION
from lorrery.service.names import cut, quoted
from lorrery.service.telemetry.metrics import expose

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {}}}
    for status, text in (
        (400, "A bad value, or a request that can never fit."),
        (401, "No valid API key."),
        (403, "This key may not do that."),
        (404, "No such model or adapter."),
        (409, "The name stands for something else."),
        (413, "The body is too long."),
        (429, "A queue or quota is full; see retry-after."),
        (500, "Our fault; the router's log has more."),
        (503, "No worker or scheduler, or draining; see retry-after."),
        (504, "A scheduler did not answer in time."),
    )
}


_MAX_REASONS = 3
_ALTERNATIVES = frozenset((*KINDS, "str", "int", "float", "bool", "list", "dict", "none", "constrained-str"))
_NO_FIELD = frozenset("[](){}")
"""In pydantic's other names of types, and in no field's."""


def make_app(handler: Handler, registry: CollectorRegistry) -> FastAPI:
    """Return the ASGI application of a router's HTTP edge.

    Args:
        handler: performs the operations.
        registry: shown by `/metrics`.
    """
    app = FastAPI(title="Lorrery", version=VERSION, responses=_ERRORS)
    edge = Edge(handler)
    for dialect in DIALECTS:
        app.include_router(import_module(dialect).routes(edge))
    _add_process_routes(app, edge, registry)
    _add_errors(app)
    if origins := handler.settings.router.http_allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _add_process_routes(app: FastAPI, edge: Edge, registry: CollectorRegistry) -> None:
    handler = edge.handler

    async def health() -> Response:
        """Answer 200 while requests can be served, else 503: no scheduler or no worker, or draining."""
        return Response(status_code=200 if await handler.can_serve() else 503)

    for path in ("/health", "/healthz", "/ping"):
        app.add_api_route(path, health, methods=["GET"], tags=["process"], response_class=Response)
        app.add_api_route(path, health, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/ping", health, methods=["POST"], include_in_schema=False)  # vLLM takes it there only

    @app.get("/load", tags=["process"])
    async def load(request: Request) -> dict[str, int]:
        """Return how many requests are open at this router; with API keys, to an operator."""
        check_operator(edge.caller(request), "read the router's load")
        return {"server_load": handler.num_open}

    @app.get("/version", tags=["process"])
    async def version() -> dict[str, str]:
        """Return the version of Lorrery."""
        return {"version": VERSION}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", tags=["process"], response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Show the router's metrics, and the cluster as one engine under vLLM's names; with API keys, to an operator.

        They name every tenant and adapter.
        """
        check_operator(edge.caller(request), "read the router's metrics")
        engine = await handler.engine_metrics()
        shown = registry if engine is None else _Both(registry, engine)
        # In a thread, since it takes some 20 ms, in which no token would leave.
        content_type, text = await asyncio.to_thread(expose, shown, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})


class _Both(Collector):
    """The series of two registries, which have no name in common."""

    def __init__(self, first: CollectorRegistry, second: CollectorRegistry) -> None:
        self._both = first, second

    def collect(self) -> Iterator[Metric]:
        """Yield the series of the first, then of the second."""
        for registry in self._both:
            yield from registry.collect()


def _got(error: dict[str, Any]) -> str:
    """Describe the value of a wrong field, or what is wrong with a body; empty if it is missing."""
    value = error["input"]
    if error["type"] == "missing":
        return ""
    if error["type"] == "json_invalid":
        return f": {error['ctx']['error']}"
    if isinstance(value, dict | list):
        return f", got {'an object' if isinstance(value, dict) else 'an array'} of {len(value)}"
    return f", got {quoted(value) if isinstance(value, str) else cut(dumps(value))}"


def _field(error: dict[str, Any]) -> str:
    """Return the path of a wrong field as vLLM gives it.

    pydantic's paths also name the alternatives of a union that it tried; of those, vLLM leaves classes in.
    """
    return ".".join(
        cut(str(part)) for part in error["loc"] if str(part) not in _ALTERNATIVES and not _NO_FIELD & {*str(part)}
    )


def _first_error(error: RequestValidationError) -> tuple[str | None, str]:
    """Return the path of the first wrong field and why it is wrong; a field of a union type has one reason per type."""
    errors = error.errors()
    if isinstance(errors[0], str):  # about the whole request
        return None, errors[0]
    where = _field(errors[0])
    reasons = dict.fromkeys(str(one["msg"]) for one in errors if _field(one) == where)
    return where, "; or ".join(list(reasons)[: 1 + _MAX_REASONS]) + _got(errors[0])


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(grpc.aio.AioRpcError)
    async def scheduler_refused(_: Request, error: grpc.aio.AioRpcError) -> Response:
        status = HTTP_STATUS.get(error.code(), HTTPStatus.INTERNAL_SERVER_ERROR)
        return json_response(body(status, error.details() or ""), status)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        field, why = _first_error(error)
        error.body = None
        let_go(error)
        text = why if field is None else f"{field}: {why}"
        status = HTTPStatus.BAD_REQUEST
        return json_response(body(status, text, field, status.phrase), status)

    @app.exception_handler(UnicodeEncodeError)
    async def no_unicode(_: Request, error: UnicodeEncodeError) -> Response:
        let_go(error)
        text = f"half of a surrogate pair ({error.object[error.start]!r}) is no character; leave it out"
        return json_response(body(HTTPStatus.BAD_REQUEST, text), HTTPStatus.BAD_REQUEST)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_response(Internal(str(error)))
