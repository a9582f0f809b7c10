"""CPU time of a step in the worker's and scheduler's processes, compared with bare streams with as many messages.

The benchmark stands for the router: it submits a batch of endless requests on a `Route` stream and reads the
scheduler's messages for each step. Every window of the cluster is paired with one of `bare_steps`, at the cluster's
pace and message sizes, and of a process that only wakes at that pace; the figures are medians of windows and of the
pairs' ratios. The batch does not change: the step is measured, not the decision.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from rich.table import Table

from lab.bench import bare_steps
from lab.bench.cluster import BenchBrokenError, measured_cluster
from lab.bench.meter import Meter
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.network.channel import open_channel
from lorrery.service.settings.sections import TlsSettings
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc
from lorrery.vocabulary import u32

CASES = ((1, 32), (1, 256), (8, 4))
"""GPUs of the worker's process, and sequences of each GPU."""
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 1000  # so that 256 requests fit in the KV pool and outlast a window
SETTLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One process in one case.

    Attributes:
        process: `worker` or `scheduler`.
        gpus: of the worker's process.
        batch: sequences of each GPU.
        steps_per_second: of all GPUs.
        step_us: CPU microseconds of the process per step.
        bare_us: CPU microseconds of the bare stream's process for its messages.
        wake_us: CPU microseconds of a process that wakes as often and does nothing.
        ratio: `step_us` / `bare_us`, median of the pairs.
    """

    process: str
    gpus: int
    batch: int
    steps_per_second: float
    step_us: float
    bare_us: float
    wake_us: float
    ratio: float


async def measure(
    seconds: float, num_pairs: int, watch: Callable[[str], None], cases: Iterable[tuple[int, int]] = CASES
) -> list[Row]:
    """Measure each case.

    Args:
        seconds: length of a window.
        num_pairs: number of pairs of windows.
        watch: called with the name of each case.
        cases: as `CASES`.
    """
    rows: list[Row] = []
    for gpus, batch in cases:
        watch(f"{gpus} x batch {batch}")
        overrides = [f"scheduler.max_num_seqs={batch}", f"worker.gpus={gpus}", "scheduler.placement=least_loaded"]
        async with measured_cluster(overrides) as cluster:
            pairs = [await _pair(cluster, batch, gpus, seconds) for _ in range(num_pairs)]
        for process in ("worker", "scheduler"):
            own = [pair[process] for pair in pairs]
            rate, step_us, bare_us, wake_us = (statistics.median(column) for column in zip(*own, strict=True))
            ratio = statistics.median(step / bare for _, step, bare, _ in own)
            rows.append(Row(process, gpus, batch, rate, step_us, bare_us, wake_us, ratio))
    return rows


async def _pair(cluster: LocalCluster, batch: int, gpus: int, seconds: float) -> dict[str, tuple[float, ...]]:
    """Return by process: steps per second, and CPU microseconds per step of the cluster, bare streams, and waking."""
    pids = {"worker": cluster.processes["worker-0"].pid, "scheduler": cluster.processes["scheduler"].pid}
    async with _decoding(cluster.scheduler_address, batch * gpus) as count:
        first, began = count.num, time.monotonic()
        meter = Meter(pids)
        await asyncio.sleep(seconds)
        used = meter.read()
        rate = (count.num - first) / batch / (time.monotonic() - began)
    step_us = {name: one.cpu_share / rate * 1e6 for name, one in used.items()}
    step_bytes = len(_step(batch).SerializeToString())
    async with contextlib.AsyncExitStack() as stack:
        address, relay = await stack.enter_async_context(bare_steps.bare_relay(step_bytes))
        sender = await stack.enter_async_context(bare_steps.bare_sender(address, 1 / rate, step_bytes))
        channel = open_channel(address, TlsSettings())
        stack.push_async_callback(channel.close)
        waker = await stack.enter_async_context(bare_steps.bare_wakes(1 / rate))
        call = bare_steps.stream(channel, bare_steps.READ)
        stack.callback(call.cancel)
        count = _Count()
        reading = asyncio.create_task(count.all_of(call))
        stack.callback(reading.cancel)
        await asyncio.sleep(SETTLE_SECONDS)
        meter, before = Meter({"worker": sender, "scheduler": relay, "waker": waker}), count.num
        await asyncio.sleep(seconds)
        used, num = meter.read(), count.num - before
    if not num:
        raise BenchBrokenError("the bare streams carried no message in a whole window")
    wake_us = used["waker"].cpu_share / rate * 1e6
    return {name: (rate, step_us[name], used[name].cpu_seconds / num * 1e6, wake_us) for name in pids}


class _Count:
    """Counter of received messages or tokens."""

    num = 0

    async def all_of(self, call: bare_steps.Call) -> None:
        async for _ in call:
            self.num += 1


@contextlib.asynccontextmanager
async def _decoding(address: str, num_requests: int) -> AsyncIterator[_Count]:
    """Let `num_requests` requests decode; yield the token count once all have a token."""
    channel = open_channel(address, TlsSettings())
    call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Route()
    started, begun, count = asyncio.Event(), set[int](), _Count()

    async def read() -> None:
        while isinstance(message := await call.read(), pb.RouteResponse):
            count.num += len(message.tokens.handles_u32) // u32.ITEM_BYTES
            if not started.is_set():
                begun.update(u32.unpack(message.tokens.handles_u32))
                if len(begun) == num_requests:
                    started.set()

    reading = asyncio.create_task(read())
    try:
        await call.write(pb.RouteRequest(hello=pb.RouterHello(router_id="bench")))
        for handle in range(1, num_requests + 1):
            await call.write(pb.RouteRequest(submit=_submit(handle)))
        async with asyncio.timeout(60):
            await started.wait()
        await asyncio.sleep(SETTLE_SECONDS)
        yield count
    finally:
        reading.cancel()
        call.cancel()
        await channel.close()
        await asyncio.sleep(SETTLE_SECONDS)  # until the scheduler has cancelled the requests of the stream


def _submit(handle: int) -> pb.Submit:
    sampling = pb.Sampling(seed=handle, max_new_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompt = u32.pack(range(1, PROMPT_TOKENS + 1))
    return pb.Submit(handle=handle, request_id=f"r{handle}", prompt_token_ids_u32=prompt, sampling=sampling)


def _step(batch: int) -> pb.AttachRequest:
    """Return a message of the size of a step's."""
    numbers = u32.pack(range(batch))
    return pb.AttachRequest(
        step=pb.StepDone(plan_id=3, start_ps=10**13, end_ps=10**13, handles_u32=numbers, token_ids_u32=numbers)
    )


def step_table(rows: Iterable[Row]) -> Table:
    """Show the cost of a step in worker and scheduler, next to bare streams."""
    table = Table(title="CPU of a step, beside bare gRPC streams with as many messages in the same run")
    table.add_column("process")
    for name in ("GPUs x batch", "steps/s", "us/step", "bare, us", "waking, us", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.process,
            f"{row.gpus} x {row.batch}",
            f"{row.steps_per_second:,.0f}",
            f"{row.step_us:.0f}",
            f"{row.bare_us:.0f}",
            f"{row.wake_us:.0f}",
            f"{row.ratio:.2f}",
        )
    return table
