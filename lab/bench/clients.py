"""Server cost of a stream's event: SSE compared with gRPC, and the whole cluster compared with other mock servers.

Two comparisons, each of windows that alternate in one run, so that other load on the machine affects both sides;
medians over the repetitions are shown.

* **SSE / gRPC**: endless streams through one router, the same number over HTTP (`/v1/completions`, `stream`) as over
  gRPC. CPU of the router per event received by the client.
* **Peers**: the same number of streams, once from all of Lorrery's processes together, once from each installed mock
  server: guidellm's, aiperf's, Dynamo's frontend with its mocker. Tokens per second of CPU time of all processes of the
  server, at the pace of Lorrery's batch; the mocker runs at its own pace.

CPU is user and system time of whole processes. An event is one token, except where Lorrery's router is late and merges
several into one: next to peers its tokens count, from its own counter. The client is this process; it counts events
and does not parse them. Opening and closing are outside the window.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median

from lab.bench.cluster import BenchBrokenError, measured_cluster
from lab.bench.meter import cpu_seconds
from lab.bench.mock_servers import PEERS, peer, program_of, tree
from lab.bench.scrape import Reading, fetch
from lab.bench.streams import StreamCount, grpc_streams, our_target, sse_streams

NUM_STREAMS = (64, 256)
PEER_STREAMS = 256
PACE_MS = 31
"""Time between two tokens of a stream: Lorrery's step with `PEER_STREAMS` sequences, and the setting of the others."""
SETTLE_SECONDS = 1.5
_OURS = "Lorrery"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window: its length, events received and tokens sent, and the server's CPU time."""

    seconds: float
    events: int
    tokens: int
    cpu_seconds: float

    @property
    def us_per_event(self) -> float:
        """CPU microseconds of the server per event."""
        return self.cpu_seconds / self.events * 1e6

    @property
    def tokens_per_cpu_second(self) -> float:
        """Tokens per second of the server's CPU time."""
        return self.tokens / self.cpu_seconds


@dataclass(frozen=True, slots=True)
class Edges:
    """Windows of one router, alternately over gRPC and HTTP, with `num_streams` streams."""

    num_streams: int
    grpc: list[Window] = field(default_factory=list)
    sse: list[Window] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """CPU per event over SSE / over gRPC, median of the pairs."""
        return median(b.us_per_event / a.us_per_event for a, b in zip(self.grpc, self.sse, strict=True))


@dataclass(frozen=True, slots=True)
class Clients:
    """All results.

    Attributes:
        edges: by number of streams.
        servers: windows by server.
        skipped: server -> what is missing.
    """

    edges: list[Edges]
    servers: dict[str, list[Window]]
    skipped: dict[str, str]

    def ratio(self, name: str) -> float:
        """Return Lorrery's tokens per CPU second / those of a server, median of the pairs."""
        pairs = zip(self.servers[_OURS], self.servers[name], strict=True)
        return median(ours.tokens_per_cpu_second / theirs.tokens_per_cpu_second for ours, theirs in pairs)


async def measure(window_seconds: float, repetitions: int, on_progress: Progress = lambda what: None) -> Clients:
    """Measure both comparisons.

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
                found.grpc.append(
                    await _window(grpc_streams(cluster.router_address, num_streams), [pid], window_seconds)
                )
                found.sse.append(
                    await _window(sse_streams(our_target(cluster, num_streams), num_streams), [pid], window_seconds)
                )
        edges.append(found)
    servers, skipped = await _peers(window_seconds, repetitions, on_progress)
    return Clients(edges, servers, skipped)


async def _peers(
    window_seconds: float, repetitions: int, on_progress: Progress
) -> tuple[dict[str, list[Window]], dict[str, str]]:
    skipped = {one.name: one.missing for one in PEERS if program_of(one) is None}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(measured_cluster([f"scheduler.max_num_seqs={PEER_STREAMS}"]))
        targets = {_OURS: our_target(cluster, PEER_STREAMS)}
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
                servers[name].append(await _window(sse_streams(target, PEER_STREAMS), pids, window_seconds, metrics))
    return servers, skipped


async def _window(
    streams: "contextlib.AbstractAsyncContextManager[StreamCount]",
    pids: Sequence[int],
    seconds: float,
    metrics: str | None = None,
) -> Window:
    """Measure one window; `metrics`: of the router, which counts the tokens where an event may have several."""

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
    await asyncio.sleep(SETTLE_SECONDS)  # let cancelled streams close
    num_tokens = all_events - events if metrics is None else last - first
    return Window(ended - begun, all_events - events, num_tokens, all_cpu - cpu)
