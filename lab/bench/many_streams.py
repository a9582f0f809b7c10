"""Cost of a token with 64, 256 and 1,000 streams, over gRPC and over HTTP, in the router and its client.

One cluster for each number of streams, alike except for the step length, which is set so that each yields
`TOKENS_PER_SECOND`: the difference is then the cost of a stream's existence, not of the router's load. The windows of
all six alternate in one run; each round gives one ratio, and the medians are reported.

CPU is user and system time of one process, divided by the tokens that the router wrote in the window. A router that is
late puts several tokens into a message, which costs as much as one token's, so the cost per message is shown too. The
clients run in this process. For the router's figures they do not parse what they receive; for the client's own they are
the load generator's, which parse everything. Opening and closing are outside the windows.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from statistics import median

from lab.bench.cluster import BenchBrokenError, measured_cluster
from lab.bench.last_hop import let_go
from lab.bench.meter import BUSY_SHARE, Meter
from lab.bench.received import grpc_received, http_received
from lab.bench.scrape import Reading, fetch
from lab.bench.streams import StreamCount, grpc_streams, our_target, sse_streams
from lorrery.local.cluster import LocalCluster

NUM_STREAMS = (64, 256, 1000)
TOKENS_PER_SECOND = 5000
AIM_RATIO = 0.9
SETTLE_SECONDS = 1.5

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window.

    Attributes:
        tokens: tokens written by the router.
        messages: messages that carried them.
        cpu_seconds: of the measured process.
        client_share: share of a core used by the clients.
        lag_seconds: p99 of the router's lateness in delivering frames.
    """

    seconds: float
    tokens: float
    messages: float
    cpu_seconds: float
    client_share: float
    lag_seconds: float

    @property
    def us_per_token(self) -> float:
        """CPU microseconds per token."""
        return self.cpu_seconds / self.tokens * 1e6

    @property
    def us_per_message(self) -> float:
        """CPU microseconds per message."""
        return self.cpu_seconds / self.messages * 1e6


@dataclass(frozen=True, slots=True)
class ManyStreams:
    """The windows of one process at one edge, by number of streams; windows with the same index belong to one round.

    Attributes:
        edge: gRPC or HTTP.
        process: `router` or `client`.
    """

    edge: str
    process: str
    windows: dict[int, list[Window]]

    def median(self, num_streams: int, value: Callable[[Window], float]) -> float:
        """Return the median of a value over the windows with `num_streams` streams."""
        return median(map(value, self.windows[num_streams]))

    def ratio(self, num_streams: int) -> float:
        """Return tokens per CPU second / those with the fewest streams; median of the rounds."""
        fewest = self.windows[min(self.windows)]
        rounds = zip(fewest, self.windows[num_streams], strict=True)
        return median(few.us_per_token / many.us_per_token for few, many in rounds)

    @property
    def void(self) -> str:
        """Why the figures are void; empty if they are valid."""
        busy = max(window.client_share for windows in self.windows.values() for window in windows)
        return f"the {self.edge} clients took {busy:.0%} of a core" if busy > BUSY_SHARE else ""


async def measure(
    window_seconds: float, repetitions: int, on_progress: Progress = lambda what: None
) -> list[ManyStreams]:
    """Measure both edges with each number of streams.

    Raises:
        BenchBrokenError: a stream failed or ended.
        LorreryError: a cluster did not start.
    """
    edges: dict[tuple[str, str], Callable[[LocalCluster, int], AbstractAsyncContextManager[StreamCount]]] = {
        ("gRPC", "router"): lambda cluster, num: grpc_streams(cluster.router_address, num),
        ("HTTP", "router"): lambda cluster, num: sse_streams(our_target(cluster, num), num),
        ("gRPC", "client"): grpc_received,
        ("HTTP", "client"): http_received,
    }
    found = {edge: ManyStreams(*edge, {num: [] for num in NUM_STREAMS}) for edge in edges}
    async with AsyncExitStack() as stack:
        clusters = {num: await stack.enter_async_context(_cluster(num)) for num in NUM_STREAMS}
        for repetition in range(repetitions):
            for edge, streams in edges.items():
                for num, cluster in clusters.items():
                    on_progress(f"{num} streams over {edge[0]}, repetition {repetition + 1} of {repetitions}")
                    window = await _window(cluster, streams(cluster, num), window_seconds, edge[1])
                    found[edge].windows[num].append(window)
    return list(found.values())


def _cluster(num_streams: int) -> AbstractAsyncContextManager[LocalCluster]:
    return measured_cluster(
        [
            f"scheduler.max_num_seqs={num_streams}",
            "worker.step_time=constant",
            f"worker.constant.step_ms={1000 * num_streams / TOKENS_PER_SECOND:g}",
        ]
    )


async def _window(
    cluster: LocalCluster, streams: AbstractAsyncContextManager[StreamCount], seconds: float, process: str
) -> Window:
    async with streams as count:
        await asyncio.sleep(SETTLE_SECONDS)
        before = await asyncio.to_thread(fetch, cluster.metrics_address("router"))
        meter = Meter({"router": cluster.processes["router"].pid, "client": os.getpid()})
        await asyncio.sleep(seconds)
        usage = meter.read()
        after = await asyncio.to_thread(fetch, cluster.metrics_address("router"))
    await let_go(cluster)
    shown = Reading.parse(after).since(Reading.parse(before))
    tokens, messages = (shown.total(f"lorrery_router_{name}_total") for name in ("output_tokens", "messages"))
    if count.failure or not tokens:
        raise BenchBrokenError(f"a stream failed: {count.failure or 'no token came'}")
    return Window(
        usage["router"].wall_seconds,
        tokens,
        messages,
        usage[process].cpu_seconds,
        usage["client"].cpu_share,
        shown.quantile("lorrery_router_lag_wall_seconds", 0.99) or 0.0,
    )
