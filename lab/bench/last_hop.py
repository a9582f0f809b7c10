"""CPU time of a token per process, compared with a bare gRPC stream at the same pace.

The last hop, router to client, limits the whole system: one message per token and stream. So a batch of 32 and of 256
streams runs through the cluster (A: worker, scheduler, router, client), and then the same number of streams from a
server that only writes pre-serialised bytes (B: `lab.bench.bare_stream`). B's messages have the typical size of A's and
arrive at A's pace, all streams at once. A and B alternate in one run, each repetition gives one ratio, and the medians
are reported: other load on the machine then affects both.

CPU is user and system time of the whole process over the window, divided by the tokens that the client received in it.
Router and client are compared per message, since a message costs the same whatever it carries: a router that coalesces
because the machine is busy would otherwise look cheap. The client is the load generator's for A and one that only
counts messages for B, both in this process. The streams are opened before the window and settle first, so opening,
prefill and closing are excluded.

A repetition is void if a client used more than 80 % of a core, or if B's pace differs from A's by more than 5 %, which
happens if the machine stood still for several steps.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import grpc.aio
from rich.console import Group
from rich.table import Table

from lab.bench.bare_stream import BareClient, bare_server
from lab.bench.cluster import BenchBrokenError, endless_request, measured_cluster, while_alive
from lab.bench.marks import notes_below, percent
from lab.bench.meter import BUSY_SHARE, Meter, Usage
from lab.bench.scrape import Reading, fetch
from lab.bench.streams import StreamCount
from lorrery.loadgen.client import RouterClient
from lorrery.loadgen.reception import Reception
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.network.channel import open_channel
from lorrery.service.settings.sections import TlsSettings
from lorrery.v1 import router_pb2, router_pb2_grpc

BATCHES = (32, 256)
PROMPT_TOKENS = 16
_POOL_TOKENS = 400_000  # slightly less than the GPU's pool; all streams must fit at their longest
SETTLE_SECONDS = 1.0
MAX_PACE_DIFFERENCE = 0.05
ROUTER_AIM, INNER_AIM, EFFICIENCY_AIM = 1.25, 0.15, 0.8
OPEN_SECONDS, CLOSE_SECONDS = 30.0, 20.0
_STREAM_SECONDS = 300.0
_NUM_SIZE_SAMPLES = 64

Stream = Callable[[int, Callable[[int], None]], Coroutine[Any, Any, None]]
"""Runs stream number n until cancelled; calls back with the number of tokens of each message."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window.

    Attributes:
        tokens: tokens received by the client.
        messages: messages that carried them.
        usage: by process.
    """

    seconds: float
    tokens: int
    messages: int
    usage: dict[str, Usage]

    def us_per_token(self, *names: str) -> float:
        """Return CPU microseconds per token of these processes together."""
        return sum(self.usage[name].cpu_seconds for name in names) / self.tokens * 1e6

    def us_per_message(self, name: str) -> float:
        """Return CPU microseconds per message of this process."""
        return self.usage[name].cpu_seconds / self.messages * 1e6

    @property
    def tokens_per_second(self) -> float:
        """Rate at which the client received tokens."""
        return self.tokens / self.seconds

    @property
    def client_busy(self) -> bool:
        """Whether the client was so busy that it measured itself."""
        return self.usage["client"].cpu_share > BUSY_SHARE


CLUSTER = ("worker", "scheduler", "router", "client")
BARE = ("server", "client")


@dataclass(frozen=True, slots=True)
class LastHop:
    """The medians over the repetitions at one batch size.

    Attributes:
        message_bytes: size of a bare message.
        step_seconds: mean time between two tokens of a stream.
        tokens_per_second: of the cluster.
        pace_ratio: tokens/s of the bare stream / those of the cluster.
        tokens_per_message: above 1 where the router coalesces.
        us_per_token: CPU microseconds per token, by process; `bare_us_per_token`: the bare pair's.
        us_per_step: worker and scheduler, per step.
        router_ratio: router / bare server, CPU per message.
        client_ratio: load generator / bare client, CPU per message.
        inner_share: (worker + scheduler) / all four.
        efficiency_ratio: tokens per CPU second of router and client / those of the bare pair; coalescing raises it.
        repetitions: number of windows of each kind.
        num_void: how many of them are void; these are left out unless all are.
        run_queue_delay_ratio: the largest of any process in any window; None if unknown.
        windows: every pair, for inspection.
    """

    batch: int
    message_bytes: int
    step_seconds: float
    tokens_per_second: float
    pace_ratio: float
    tokens_per_message: float
    us_per_token: dict[str, float]
    bare_us_per_token: dict[str, float]
    us_per_step: dict[str, float]
    router_ratio: float
    client_ratio: float
    inner_share: float
    efficiency_ratio: float
    repetitions: int
    num_void: int
    run_queue_delay_ratio: float | None
    windows: list[tuple[Window, Window]]

    @property
    def void(self) -> str:
        """Why the figures are void; empty if they are valid."""
        return (
            "the client was too busy, or the paces differ, in every repetition"
            if self.num_void == self.repetitions
            else ""
        )


async def measure(window_seconds: float, repetitions: int, on_progress: Progress = lambda what: None) -> list[LastHop]:
    """Measure at every batch size.

    Raises:
        BenchBrokenError: a stream failed, or a service exited or did not release its streams.
        LorreryError: the cluster did not start.
    """
    results: list[LastHop] = []
    for batch in BATCHES:
        async with measured_cluster([f"scheduler.max_num_seqs={batch}"]) as cluster, bare_server() as bare:
            await while_alive(
                cluster, _measure(cluster, bare, batch, window_seconds, repetitions, results, on_progress)
            )
    return results


async def _measure(
    cluster: LocalCluster,
    bare: tuple[str, int],
    batch: int,
    window_seconds: float,
    repetitions: int,
    results: list[LastHop],
    on_progress: Progress,
) -> None:
    bare_address, bare_pid = bare
    pids = {"worker": cluster.processes["worker-0"].pid, "client": os.getpid()}
    pids |= {name: cluster.processes[name].pid for name in ("scheduler", "router")}
    bare_client = BareClient(bare_address)
    pairs = []
    try:
        async with RouterClient(cluster.router_address, TlsSettings()) as client:
            await client.cluster(10.0)
            message_bytes = await _typical_message_bytes(cluster.router_address)
            for repetition in range(repetitions):
                on_progress(f"batch {batch}, repetition {repetition + 1} of {repetitions}")
                ours = await _window(batch, _cluster_stream(client, batch), pids, window_seconds)
                await _let_go(cluster)
                pace = ours.seconds * batch / ours.tokens

                def stream(_index: int, on_tokens: Callable[[int], None], pace: float = pace) -> Any:  # noqa: ANN401
                    return bare_client.receive(pace, message_bytes, on_tokens)

                theirs = await _window(batch, stream, {"server": bare_pid, "client": os.getpid()}, window_seconds)
                pairs.append((ours, theirs))
    finally:
        await bare_client.close()
    results.append(_summary(batch, message_bytes, pairs))


def _cluster_stream(client: RouterClient, batch: int) -> Stream:
    max_new_tokens = _POOL_TOKENS // batch - PROMPT_TOKENS

    async def stream(index: int, on_tokens: Callable[[int], None]) -> None:
        request = endless_request(f"stream-{index}", PROMPT_TOKENS, max_new_tokens)
        reception = Reception()
        await client.receive(request, reception, timeout_seconds=_STREAM_SECONDS, on_tokens=on_tokens)
        raise BenchBrokenError(f"a stream ended: {reception.status} {reception.detail}")

    return stream


async def _window(batch: int, stream: Stream, pids: dict[str, int], window_seconds: float) -> Window:
    """Open `batch` streams, let them settle, measure, and close them."""
    count, tokens = StreamCount(batch), 0

    async def counted(index: int) -> None:
        begun = False

        def on_tokens(num_tokens: int) -> None:
            nonlocal begun, tokens
            if not begun:
                begun = True
                count.began()
            tokens += num_tokens
            count.events += 1

        try:
            await stream(index, on_tokens)
            count.failed("a stream ended by itself")
        except (BenchBrokenError, grpc.aio.AioRpcError) as error:
            count.failed(str(error))

    async with count.opened(counted):
        await asyncio.sleep(SETTLE_SECONDS)
        meter, start = Meter(pids), time.monotonic()
        first_token, first_message = tokens, count.events
        await asyncio.sleep(window_seconds)
        seconds = time.monotonic() - start
        window = Window(seconds, tokens - first_token, count.events - first_message, meter.read())
    if count.failure or not window.tokens:
        raise BenchBrokenError(count.failure or "no token came in a whole window")
    return window


async def _let_go(cluster: LocalCluster) -> None:
    """Wait until router and scheduler have removed the cancelled streams."""
    end = time.monotonic() + CLOSE_SECONDS
    while True:
        router = Reading.parse(await asyncio.to_thread(fetch, cluster.metrics_address("router")))
        scheduler = Reading.parse(await asyncio.to_thread(fetch, cluster.metrics_address("scheduler")))
        left = router.total("lorrery_router_open_handlers") + scheduler.total("lorrery_scheduler_in_flight_requests")
        if not left:
            return
        if time.monotonic() > end:
            raise BenchBrokenError(f"{left:g} streams are still open {CLOSE_SECONDS:g} s after they were cancelled")
        await asyncio.sleep(0.1)


async def _typical_message_bytes(router_address: str) -> int:
    """Return the median size of a message with one token."""
    channel = open_channel(router_address, TlsSettings())
    call = router_pb2_grpc.RouterServiceStub(channel).Generate(
        endless_request("sizes", PROMPT_TOKENS, _NUM_SIZE_SAMPLES), timeout=OPEN_SECONDS
    )
    sizes = []
    try:
        async for response in call:
            assert isinstance(response, router_pb2.GenerateResponse)
            if not response.HasField("finish"):
                sizes.append(response.ByteSize())
    finally:
        call.cancel()
        await channel.close()
    return round(median(sizes))


def _comparable(ours: Window, theirs: Window) -> bool:
    differ = abs(theirs.tokens_per_second / ours.tokens_per_second - 1) > MAX_PACE_DIFFERENCE
    return not (ours.client_busy or theirs.client_busy or differ)


def _summary(batch: int, message_bytes: int, pairs: list[tuple[Window, Window]]) -> LastHop:
    good = [pair for pair in pairs if _comparable(*pair)]
    used = good or pairs

    def ours(value: Callable[[Window], float]) -> float:
        return median(value(a) for a, _ in used)

    def bare(value: Callable[[Window], float]) -> float:
        return median(value(b) for _, b in used)

    def ratio(value: Callable[[Window, Window], float]) -> float:
        return median(value(a, b) for a, b in used)

    def us_per_token(name: str) -> Callable[[Window], float]:
        return lambda window: window.us_per_token(name)

    delays = [
        usage.run_queue_delay_ratio
        for pair in pairs
        for window in pair
        for usage in window.usage.values()
        if usage.run_queue_delay_ratio is not None
    ]
    return LastHop(
        batch=batch,
        message_bytes=message_bytes,
        step_seconds=ours(lambda w: w.seconds * batch / w.tokens),
        tokens_per_second=ours(lambda w: w.tokens_per_second),
        pace_ratio=ratio(lambda a, b: b.tokens_per_second / a.tokens_per_second),
        tokens_per_message=ours(lambda w: w.tokens / w.messages),
        us_per_token={name: ours(us_per_token(name)) for name in CLUSTER},
        bare_us_per_token={name: bare(us_per_token(name)) for name in BARE},
        us_per_step={name: batch * ours(us_per_token(name)) for name in ("worker", "scheduler")},
        router_ratio=ratio(lambda a, b: a.us_per_message("router") / b.us_per_message("server")),
        client_ratio=ratio(lambda a, b: a.us_per_message("client") / b.us_per_message("client")),
        inner_share=ours(lambda w: w.us_per_token("worker", "scheduler") / w.us_per_token(*CLUSTER)),
        efficiency_ratio=ratio(lambda a, b: b.us_per_token(*BARE) / a.us_per_token("router", "client")),
        repetitions=len(pairs),
        num_void=len(pairs) - len(good),
        run_queue_delay_ratio=max(delays, default=None),
        windows=pairs,
    )


def last_hop_table(results: Iterable[LastHop]) -> Group:
    """Show the cost per token by process, the cluster next to the bare stream."""
    results = list(results)
    table = Table(title="Last hop: CPU per token, beside a bare gRPC stream in the same run")
    table.add_column("")
    for result in results:
        table.add_column(f"batch {result.batch}", justify="right")
    table.add_column("aim", justify="right")

    def row(name: str, cells: Iterable[str], aim: str = "") -> None:
        table.add_row(name, *cells, aim)

    row("time between two tokens, ms", (f"{r.step_seconds * 1e3:.2f}" for r in results))
    row("tokens/s, cluster", (f"{r.tokens_per_second:,.0f}" for r in results))
    row("tokens/s, bare / cluster", (f"{r.pace_ratio:.3f}" for r in results), "1")
    row("tokens per message", (f"{r.tokens_per_message:.3f}" for r in results))
    table.add_section()
    for name in CLUSTER:
        row(f"{name}, us/token", (f"{r.us_per_token[name]:.2f}" for r in results))
    for name in BARE:
        row(f"bare {name}, us/token", (f"{r.bare_us_per_token[name]:.2f}" for r in results))
    for name in ("worker", "scheduler"):
        row(f"{name}, us/step", (f"{r.us_per_step[name]:.0f}" for r in results))
    table.add_section()
    row("router / bare server, per message", (f"{r.router_ratio:.2f}" for r in results), f"<= {ROUTER_AIM}")
    row("load generator / bare client, per message", (f"{r.client_ratio:.2f}" for r in results))
    row(
        "worker and scheduler, share of all",
        (f"{r.inner_share:.1%}" for r in results),
        f"<= {INNER_AIM:.0%} at 256",
    )
    row(
        "tokens per CPU second of router and client / bare",
        (f"{r.efficiency_ratio:.2f}" for r in results),
        f">= {EFFICIENCY_AIM}",
    )
    table.add_section()
    row("repetitions (void)", (f"{r.repetitions} ({r.num_void})" for r in results))
    row("waited for a core, at most", (percent(r.run_queue_delay_ratio) for r in results))
    void = "; ".join(f"batch {r.batch}: {r.void}" for r in results if r.void)
    delays = [r.run_queue_delay_ratio for r in results if r.run_queue_delay_ratio is not None]
    return Group(table, *notes_below(void, max(delays, default=None)))
