"""The routes of the page: the page itself, and a live feed or a record for it.

GET /         the page
GET /hello    description of the source
GET /events   live: server-sent events: a hello, then frames; after a failure a problem, then a hello again
GET /record   record: its lines

With `view=true` frames have a view too, which the page draws: notices, and figures that need more than one frame. They
come from the model that the terminal shows too, and are sent in the frame itself, as its field `view`
(docs/monitoring.md).

Each viewer of the page has a model of its own, since watches begin at different times. At ten frames per second
a viewer costs the server 0.5 % of a core for 4 workers with 32 requests each, and 1.2 % for 16 with 64; half of it is
the view.
"""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
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
from lorrery.view.frame import USUAL_HZ, Feed, Frame, Hello, checked_hz, encode
from lorrery.view.model import Model
from lorrery.view.notices import Notice
from lorrery.view.record import Record
from lorrery.view.rules import notices

VIEW_SECONDS = 0.4
"""Wall seconds between two views of a running cluster: the page's figures change no faster."""


class LostRow(msgspec.Struct, array_like=True, frozen=True):
    """A worker that is lost: index of its scheduler, its name, when it was lost, and its GPUs."""

    shard: int
    id: str
    lost_at: float
    gpu: str
    tp: int


class WorkerFigures(msgspec.Struct, array_like=True, frozen=True):
    """Figures of a worker, over 5 s; `busy_ratio` is the share of time in steps."""

    tokens_per_second: float
    busy_ratio: float


class AdapterFigures(msgspec.Struct, array_like=True, frozen=True):
    """Figures of an adapter; `key` is its name, or None for the base model.

    Attributes:
        on_gpus: number of GPUs that it is loaded on; `loading`: that it is being loaded to.
        thrash: loads soon after an eviction, in the last minute.
        is_gone: whether it is unloaded and its last request has ended.
    """

    key: str | None
    on_gpus: int
    loading: int
    thrash: int
    is_gone: bool


class TenantFigures(msgspec.Struct, array_like=True, frozen=True):
    """Figures of a tenant; shares of the tokens and of the requests are over 30 s, tokens per second over 5 s."""

    key: str
    token_share: float
    demand: float
    tokens_per_second: float


class View(msgspec.Struct, frozen=True):
    """Notices and figures as of a frame.

    Attributes:
        running: requests that run; `waiting`: that wait anywhere.
        kv_ratio: share of all KV pools together that is in use; `fullest_kv_ratio`: of the fullest.
        ttft: percentiles 50 and 95 over the requests that ended in the last 10 s; None: none did.
        workers: a row for each worker of the frame, in its order.
        adapters: those with figures other than 0, as of `tenants`.
    """

    notices: list[Notice]
    lost: list[LostRow]
    running: int
    waiting: int
    tokens_per_second: float
    ttft: tuple[float, float] | None
    kv_ratio: float
    fullest_kv_ratio: float
    workers: list[WorkerFigures]
    adapters: list[AdapterFigures]
    tenants: list[TenantFigures]


class _Viewed(msgspec.Struct, frozen=True):
    view: View


def view_of(model: Model) -> View:
    """Return the view of a model."""
    ttft = model.ttft
    return View(
        notices=notices(model),
        lost=[
            LostRow(worker.state.shard, worker.name, worker.lost_at or 0.0, worker.state.gpu, worker.state.tp)
            for worker in model.lost
        ],
        running=model.running,
        waiting=model.waiting,
        tokens_per_second=_rounded(model.tokens_per_second),
        ttft=None if ttft is None else (_rounded(ttft[0]), _rounded(ttft[1])),
        kv_ratio=_rounded(model.kv_ratio),
        fullest_kv_ratio=_rounded(max((worker.kv_ratio for worker in model.workers), default=0.0)),
        workers=[
            WorkerFigures(_rounded(worker.tokens_per_second), _rounded(worker.busy_ratio)) for worker in model.workers
        ],
        adapters=[
            AdapterFigures(adapter.key, adapter.on_gpus, adapter.loading, thrash, adapter.is_gone)
            for adapter in model.adapters.values()
            if (thrash := adapter.recent_thrash) or adapter.on_gpus or adapter.loading or adapter.is_gone
        ],
        tenants=[
            TenantFigures(
                key, _rounded(share.tokens), _rounded(share.demand), _rounded(model.tenants[key].tokens_per_second)
            )
            for key, share in model.shares().items()
            if share.tokens or share.demand
        ],
    )


def encode_viewed(frame: Frame, view: View | None) -> bytes:
    """Return a frame and its view as one line of JSON, without a line end."""
    line = encode(frame)
    return line if view is None else b"%s,%s" % (line[:-1], _encoder.encode(_Viewed(view))[1:])


class Watch:
    """The frames of one watch of a running cluster, as the page gets them."""

    def __init__(self, hello: Hello) -> None:
        self._model = Model(hello)
        self._viewed_at = float("-inf")
        self._lost: list[str] = []

    def begin(self, hello: Hello) -> None:
        """Continue with a new connection."""
        self._model.begin(hello)

    def line(self, frame: Frame, now: float) -> bytes:
        """Apply a frame and return its line, with a view if the last one is old or other workers are lost.

        Args:
            frame: the next one.
            now: wall seconds.
        """
        self._model.apply(frame)
        lost = [worker.key for worker in self._model.lost]
        if now - self._viewed_at < VIEW_SECONDS and lost == self._lost:
            return encode(frame)
        self._viewed_at, self._lost = now, lost
        return encode_viewed(frame, view_of(self._model))


def viewed_lines(hello: Hello, frames: Iterable[Frame]) -> Iterator[bytes]:
    """Yield the lines of a record, each frame with its view, with line ends.

    Costs 1.2 ms of CPU per frame of 8 workers with 32 requests each.
    """
    model = Model(hello)
    yield encode(hello) + b"\n"
    for frame in frames:
        model.apply(frame)
        yield encode_viewed(frame, view_of(model)) + b"\n"


def _rounded(figure: float) -> float:
    return round(figure, 4)


_encoder = msgspec.json.Encoder()


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
