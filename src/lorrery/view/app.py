"""The routes of the page: the page itself, and a live feed or a record for it.

GET /         the page
GET /hello    description of the source
GET /events   live: server-sent events: a hello, then frames; after a failure a problem, then a hello again
GET /record   record: its lines

With `view=true` frames have a view too, which the page draws.
"""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator
from http import HTTPStatus
from itertools import islice
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request
from starlette.concurrency import iterate_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorrery.service.errors import InvalidRequest, LorreryError
from lorrery.view.frame import USUAL_HZ, Feed, checked_hz, encode
from lorrery.view.record import Record
from lorrery.view.view import Watch, viewed_lines

PAGE = Path(__file__).parent / "page"
RETRY_SECONDS = 1.0
"""Delay after a failed watch before the next one, in wall seconds."""
NDJSON = "application/x-ndjson"
_LINES_AT_ONCE = 20
_GZIP_LEVEL = 3
"""For a record with views level 9 takes five times as long, and saves a third."""
_HEADERS = (
    (b"cache-control", b"no-cache"),  # revalidated each time, and answered with 304 while unchanged
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


def make_app(source: Feed | Record, hz: float = USUAL_HZ) -> FastAPI:
    """Return the application that shows a feed or a record.

    Args:
        source: what to show.
        hz: default frames per second.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        return _error(str(error.detail), error.status_code)

    @app.exception_handler(LorreryError)
    async def not_to_be_had(request: Request, error: LorreryError) -> Response:
        return _error(str(error), HTTPStatus.SERVICE_UNAVAILABLE)

    app.add_middleware(GZipMiddleware, minimum_size=1_000, compresslevel=_GZIP_LEVEL)
    app.add_middleware(_Headers)
    if isinstance(source, Record):
        _add_record(app, source)
    else:
        _add_feed(app, source, hz)
    app.mount("/", StaticFiles(directory=PAGE, html=True, check_dir=False))
    return app


class _Headers:
    """Adds headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _add_record(app: FastAPI, record: Record) -> None:
    @app.get("/hello")
    async def hello() -> Response:
        return Response(encode(record.hello), media_type="application/json")

    @app.get("/events")
    async def events() -> Response:
        return _error("this is a record, see /record", HTTPStatus.NOT_FOUND)

    @app.get("/record")
    async def lines(request: Request) -> Response:
        first, last = _number(request, "from"), _number(request, "to")
        if _wants_view(request):
            lines = viewed_lines(record.hello, record.frames(first, last))
            pieces = iter(lambda: b"".join(islice(lines, _LINES_AT_ONCE)), b"")
            return StreamingResponse(iterate_in_threadpool(pieces), media_type=NDJSON)
        if first is None and last is None and record.is_compressed and _takes_gzip(request):
            headers = {"content-encoding": "gzip", "vary": "accept-encoding"}
            return FileResponse(record.path, media_type=NDJSON, headers=headers)
        return StreamingResponse(iterate_in_threadpool(record.lines(first, last)), media_type=NDJSON)


def _add_feed(app: FastAPI, feed: Feed, usual_hz: float) -> None:
    @app.get("/hello")
    async def hello() -> Response:
        return Response(encode(await feed.hello()), media_type="application/json")

    @app.get("/events")
    async def events(request: Request) -> Response:
        shown = _events(feed, _hz(request, usual_hz), with_view=_wants_view(request))
        return EventStream(shown, compress=_takes_gzip(request))

    @app.get("/record")
    async def lines() -> Response:
        return _error("this is a live cluster, see /events", HTTPStatus.NOT_FOUND)


async def _events(feed: Feed, hz: float, *, with_view: bool) -> AsyncIterator[bytes]:
    watch: Watch | None = None
    while True:
        try:
            hello = await feed.hello()
            if watch is not None:
                watch.begin(hello)
            elif with_view:
                watch = Watch(hello)
            yield _event("hello", encode(hello))
            async for frame in feed.frames(hz):
                yield _event("frame", encode(frame) if watch is None else watch.line(frame, time.monotonic()))
            message = "the cluster has ended the watch"
        except LorreryError as error:
            message = str(error)
        yield _event("problem", msgspec.json.encode({"message": message}))
        await asyncio.sleep(RETRY_SECONDS)


def _event(kind: str, line: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), line)


class EventStream(Response):
    """Server-sent events, each sent at once; the next one is requested after the reader has taken the previous one.

    Args:
        events: complete events; closed when the reader has gone.
        compress: whether to use gzip.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], *, compress: bool) -> None:
        super().__init__(headers={"content-encoding": "gzip", "vary": "accept-encoding"} if compress else None)
        del self.headers["content-length"]
        self._events = events
        self._gzip = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS) if compress else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, until the reader disconnects."""
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": self.raw_headers})
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((writing, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, gone):
                task.cancel()
            await asyncio.wait((writing, gone))
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        try:
            async for event in self._events:
                body = event
                if self._gzip is not None:
                    body = self._gzip.compress(event) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]  # a generator


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _hz(request: Request, usual: float) -> float:
    hz = _number(request, "hz")
    if hz is None:
        return usual
    try:
        return checked_hz(hz)
    except InvalidRequest as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None


def _wants_view(request: Request) -> bool:
    text = request.query_params.get("view", "false")
    if text not in ("true", "false"):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"view is {text[:40]!r}; it must be true or false")
    return text == "true"


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if number != number or number in (float("inf"), float("-inf")):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"{name} is {text[:40]!r}; it must be a number")
    return number


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def _error(message: str, status: int) -> Response:
    return Response(msgspec.json.encode({"error": message}), status, media_type="application/json")
