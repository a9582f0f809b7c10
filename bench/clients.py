"""What an event of a stream costs the server: SSE beside gRPC, and the whole cluster beside other mock servers.

Two questions, each answered by windows that alternate in one run, so that what a neighbour does to the machine it does
to both sides; medians over the repetitions are shown.

* **SSE / gRPC**: endless streams through one router, as many over HTTP (`/v1/completions`, `stream`) as before over
  gRPC. CPU of the router per event that the client received.
* **Peers**: the same number of streams, once from all of Lorrery's processes together, once from each mock server that
  is installed: guidellm's, aiperf's, Dynamo's frontend with its mocker. Tokens per second of CPU time of all processes
  of the server, at the pace of Lorrery's batch; the mocker goes at its own.

CPU is user and system time of whole processes. An event is one token, except where Lorrery's router is late and puts
several into one: beside peers its tokens count, as its own counter has them. The client is this process, counts events
and looks at nothing in them. Opening and closing are outside the window.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any, cast

import grpc.aio

from bench.cluster import BenchBrokenError, endless_request, measured_cluster
from bench.meter import cpu_seconds
from bench.mock_servers import PEERS, Target, peer, program_of, tree
from bench.scrape import Reading, fetch
from lorrery.chassis.channel import open_channel
from lorrery.chassis.sections import TlsSettings
from lorrery.local.cluster import LocalCluster
from lorrery.v1 import router_pb2

NUM_STREAMS = (64, 256)
PEER_STREAMS = 256
PACE_MS = 31
"""Between two tokens of a stream: Lorrery's step with `PEER_STREAMS` sequences, and what the others are told."""
SETTLE_SECONDS = 1.5
OPEN_SECONDS = 60.0
_POOL_TOKENS = 400_000
_PROMPT_TOKENS = 16
_OURS = "Lorrery"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window: how long, how many events the client got and tokens it sent, and the server's CPU time."""

    seconds: float
    events: int
    tokens: int
    cpu_seconds: float

    @property
    def us_per_event(self) -> float:
        """CPU microseconds of the server for each event."""
        return self.cpu_seconds / self.events * 1e6

    @property
    def tokens_per_cpu_second(self) -> float:
        """Tokens that a second of the server's CPU time gives."""
        return self.tokens / self.cpu_seconds


@dataclass(frozen=True, slots=True)
class Edges:
    """Windows of one router, over gRPC and over HTTP in turn, with so many streams."""

    num_streams: int
    grpc: list[Window] = field(default_factory=list)
    sse: list[Window] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """CPU per event over SSE / over gRPC, median of the pairs."""
        return median(b.us_per_event / a.us_per_event for a, b in zip(self.grpc, self.sse, strict=True))


@dataclass(frozen=True, slots=True)
class Clients:
    """All of it.

    Attributes:
        edges: by number of streams.
        servers: windows by server.
        skipped: server and what is missing.
    """

    edges: list[Edges]
    servers: dict[str, list[Window]]
    skipped: dict[str, str]

    def ratio(self, name: str) -> float:
        """Return tokens per CPU second of Lorrery / of a server, median of the pairs."""
        pairs = zip(self.servers[_OURS], self.servers[name], strict=True)
        return median(ours.tokens_per_cpu_second / theirs.tokens_per_cpu_second for ours, theirs in pairs)


async def measure(window_seconds: float, repetitions: int, on_progress: Progress = lambda what: None) -> Clients:
    """Measure both.

    Raises:
        BenchBrokenError: a stream failed or ended, or a server did not start.
        LorreryError: the cluster did not start.
    """
    edges: list[Edges] = []
    for num_streams in NUM_STREAMS:
        found = Edges(num_streams)
        async with measured_cluster([f"scheduler.max_num_seqs={num_streams}"]) as cluster:
            pid = cluster.processes["router"].pid
            for repetition in range(repetitions):
                on_progress(f"{num_streams} streams, repetition {repetition + 1} of {repetitions}")
                found.grpc.append(await _window(_grpc(cluster, num_streams), [pid], window_seconds))
                found.sse.append(await _window(_sse(_ours(cluster), num_streams), [pid], window_seconds))
        edges.append(found)
    servers, skipped = await _peers(window_seconds, repetitions, on_progress)
    return Clients(edges, servers, skipped)


async def _peers(
    window_seconds: float, repetitions: int, on_progress: Progress
) -> tuple[dict[str, list[Window]], dict[str, str]]:
    skipped = {one.name: one.missing for one in PEERS if program_of(one) is None}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(measured_cluster([f"scheduler.max_num_seqs={PEER_STREAMS}"]))
        targets = {_OURS: _ours(cluster)}
        for one in PEERS:
            if one.name not in skipped:
                on_progress(f"{one.name} starts")
                targets[one.name] = await stack.enter_async_context(peer(one, PACE_MS))
        servers: dict[str, list[Window]] = {name: [] for name in targets}
        for repetition in range(repetitions):
            for name, target in targets.items():
                on_progress(f"{name}, {PEER_STREAMS} streams, repetition {repetition + 1} of {repetitions}")
                pids = [process for root in target.roots for process in tree(root)]
                metrics = cluster.metrics_address("router") if name == _OURS else None
                servers[name].append(await _window(_sse(target, PEER_STREAMS), pids, window_seconds, metrics))
    return servers, skipped


def _ours(cluster: LocalCluster) -> Target:
    body = {
        "prompt": list(range(1, _PROMPT_TOKENS + 1)),
        "max_tokens": _POOL_TOKENS // PEER_STREAMS - _PROMPT_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    roots = [process.pid for process in cluster.processes.values()]
    return Target(cluster.http_address, "/v1/completions", body, roots)


class StreamCount:
    """What streams have given so far.

    Args:
        num_streams: that are to be opened.

    Attributes:
        events: of all.
        failure: what went wrong with one.
    """

    def __init__(self, num_streams: int) -> None:
        self.events = 0
        self.failure = ""
        self._missing = num_streams
        self._decided = asyncio.Event()

    def began(self) -> None:
        """Take note that one more stream has given its first event."""
        self._missing -= 1
        if not self._missing:
            self._decided.set()

    def failed(self, why: str) -> None:
        """Take note that a stream failed; the first one counts."""
        self.failure = self.failure or why
        self._decided.set()

    async def all_began(self) -> None:
        """Wait until every stream has given an event.

        Raises:
            BenchBrokenError: one failed, or they took too long.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_SECONDS):
                await self._decided.wait()
        if self._missing or self.failure:
            raise BenchBrokenError(self.failure or f"{self._missing} streams did not begin in {OPEN_SECONDS:g} s")


async def _window(
    streams: "contextlib.AbstractAsyncContextManager[StreamCount]",
    pids: Sequence[int],
    seconds: float,
    metrics: str | None = None,
) -> Window:
    """Measure one window; `metrics`: of the router that counts tokens, where events may have several."""

    async def tokens() -> int:
        if metrics is None:
            return count.events
        shown = Reading.parse(await asyncio.to_thread(fetch, metrics))
        return round(shown.total("lorrery_router_output_tokens_total"))

    async with streams as count:
        await asyncio.sleep(SETTLE_SECONDS)
        first = await tokens()
        begun, events, cpu = time.monotonic(), count.events, sum(map(cpu_seconds, pids))
        await asyncio.sleep(seconds)
        ended, all_events, all_cpu = time.monotonic(), count.events, sum(map(cpu_seconds, pids))
        last = await tokens()
    if count.failure or all_events == events:
        raise BenchBrokenError(f"a stream failed: {count.failure or 'no event came'}")
    await asyncio.sleep(SETTLE_SECONDS)  # what was cancelled leaves
    num_tokens = all_events - events if metrics is None else last - first
    return Window(ended - begun, all_events - events, num_tokens, all_cpu - cpu)


@contextlib.asynccontextmanager
async def _grpc(cluster: LocalCluster, num_streams: int) -> AsyncIterator[StreamCount]:
    """Open endless streams over gRPC, whose messages are counted as bytes."""
    count = StreamCount(num_streams)
    channel = open_channel(cluster.router_address, TlsSettings())
    # Generate's answers stay bytes: reading them would be the client's cost, and slow it down.
    generate: Any = channel.unary_stream(
        "/lorrery.v1.RouterService/Generate", request_serializer=router_pb2.GenerateRequest.SerializeToString
    )

    async def stream(number: int) -> None:
        length = _POOL_TOKENS // PEER_STREAMS - _PROMPT_TOKENS
        call = generate(endless_request(f"stream-{number}", _PROMPT_TOKENS, length))
        try:
            await call.read()
            count.began()
            while await call.read() is not grpc.aio.EOF:
                count.events += 1
            count.failed("a stream ended")
        except grpc.aio.AioRpcError as error:
            count.failed(str(error.details()))
        finally:
            call.cancel()

    tasks = [asyncio.create_task(stream(number)) for number in range(num_streams)]
    try:
        await count.all_began()
        yield count
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await channel.close()


class StreamEvents(asyncio.Protocol):
    """Sends one request and counts the events of its answer, each of which two line feeds end."""

    def __init__(self, request: bytes, count: StreamCount) -> None:
        self._request = request
        self._count = count
        self._last = b""
        self._begun = self._closing = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count what ends in these bytes."""
        if not self._begun:
            if b" 200 " not in data[:20]:
                self._count.failed(data[:300].decode(errors="replace"))
            self._begun = True
            self._count.began()
        self._count.events += (self._last + data).count(b"\n\n")
        self._last = data[-1:] if data.endswith(b"\n") and not data.endswith(b"\n\n") else b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note of an end that was not asked for."""
        if not self._closing:
            self._count.failed(f"a stream ended: {exc}")

    def close(self) -> None:
        """End the stream at once."""
        self._closing = True
        if self.transport is not None:
            self.transport.abort()


@contextlib.asynccontextmanager
async def _sse(target: Target, num_streams: int) -> AsyncIterator[StreamCount]:
    """Open endless streams over HTTP, each on a connection of its own."""
    body = json.dumps(target.body).encode()
    head = f"POST {target.path} HTTP/1.1\r\nhost: {target.address}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    host, _, port = target.address.rpartition(":")
    count = StreamCount(num_streams)
    loop = asyncio.get_running_loop()
    streams: list[StreamEvents] = []
    try:
        for _ in range(num_streams):
            _, stream = await loop.create_connection(lambda: StreamEvents(request, count), host, int(port))
            streams.append(stream)
        await count.all_began()
        yield count
    finally:
        for stream in streams:
            stream.close()
