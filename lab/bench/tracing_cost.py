"""Cost of tracing: the same cluster with one request in a hundred traced, with all traced, and with tracing off.

Three clusters run, and the load of `lab.bench.metrics_cost` (256 streams of 64 tokens, each followed by another) runs
through them in turn. A collector in this process receives the spans and discards them; its cost counts as the client's.
Figures are CPU of whole processes, the threads that send spans included, by message or token as in that benchmark.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import grpc

from lab.bench.cluster import measured_cluster, while_alive
from lab.bench.last_hop import Progress, Window
from lab.bench.metrics_cost import MAX_PACE_DIFFERENCE, OVERRIDES, SERVICES, cpu_us, load_window
from lorrery.local.cluster import LocalCluster
from lorrery.local.processes import ForkServer

AIM_RATIO = 0.03
"""Applies to all three together, at one request in a hundred."""
RATIOS = (0.01, 1.0)
ALL = "all three"
NAMES = (*SERVICES, ALL)
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass(frozen=True, slots=True)
class TracingCost:
    """The medians over the repetitions.

    Attributes:
        tokens_per_second: with tracing off.
        off_us: CPU microseconds by process, with tracing off: per message for the router, per token for the others.
        overhead_ratio: by share of requests traced and by process, the overhead.
        overheads: of each repetition.
        num_batches: batches of spans that the collector received.
        void: why the figures are void; empty: they are valid.
    """

    tokens_per_second: float
    off_us: dict[str, float]
    overhead_ratio: dict[float, dict[str, float]]
    overheads: dict[float, dict[str, list[float]]]
    num_batches: int
    void: str


class _Sink(grpc.GenericRpcHandler):
    """Accepts every export."""

    num_batches = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        if handler_call_details.method != _EXPORT:
            return None

        def take(_request: bytes, _context: grpc.ServicerContext) -> bytes:
            self.num_batches += 1
            return b""

        return grpc.unary_unary_rpc_method_handler(take)


@contextlib.contextmanager
def _sink() -> Iterator[tuple[_Sink, str]]:
    sink, server = _Sink(), grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((sink,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield sink, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0)


@contextlib.asynccontextmanager
async def _clusters(endpoint: str) -> AsyncIterator[dict[float, LocalCluster]]:
    """Start a cluster for each share of traced requests; 0: tracing is off."""
    async with contextlib.AsyncExitStack() as stack:
        forks = stack.enter_context(ForkServer())
        clusters = {}
        for ratio in (0.0, *RATIOS):
            on = (f"tracing.endpoint={endpoint}", f"tracing.sampling_ratio={ratio}") if ratio else ()
            clusters[ratio] = await stack.enter_async_context(measured_cluster((*OVERRIDES, *on), forks))
        yield clusters


async def measure(window_seconds: float, repetitions: int, on_progress: Progress = lambda what: None) -> TracingCost:
    """Measure the clusters in turn.

    Raises:
        BenchBrokenError: a stream failed, or a service exited.
        LorreryError: a cluster did not start.
    """
    rounds: list[dict[float, Window]] = []
    with _sink() as (sink, endpoint):
        async with _clusters(endpoint) as clusters:

            async def run() -> None:
                order = list(clusters)
                for repetition in range(repetitions):
                    on_progress(f"repetition {repetition + 1} of {repetitions}")
                    order = [*order[1:], order[0]]
                    rounds.append({ratio: await load_window(clusters[ratio], window_seconds) for ratio in order})

            work = run()
            for cluster in clusters.values():
                work = while_alive(cluster, work)
            await work
        return _summary(rounds, sink.num_batches)


def _us(window: Window, name: str) -> float:
    return sum(window.us_per_token(one) for one in SERVICES) if name == ALL else cpu_us(window, name)


def _summary(rounds: list[dict[float, Window]], num_batches: int) -> TracingCost:
    overheads = {
        ratio: {name: [_us(one[ratio], name) / _us(one[0.0], name) - 1 for one in rounds] for name in NAMES}
        for ratio in RATIOS
    }
    pace = median(one[RATIOS[0]].tokens_per_second / one[0.0].tokens_per_second for one in rounds)
    void = ""
    if not num_batches:
        void = "no spans came"
    elif abs(pace - 1) > MAX_PACE_DIFFERENCE:
        void = "the paces differ"
    elif any(window.client_busy for one in rounds for window in one.values()):
        void = "the client was too busy"
    return TracingCost(
        tokens_per_second=median(one[0.0].tokens_per_second for one in rounds),
        off_us={name: median(_us(one[0.0], name) for one in rounds) for name in NAMES},
        overhead_ratio={
            ratio: {name: median(values) for name, values in by_name.items()} for ratio, by_name in overheads.items()
        },
        overheads=overheads,
        num_batches=num_batches,
        void=void,
    )
