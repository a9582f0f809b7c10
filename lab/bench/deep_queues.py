"""How long a scheduler's event loop is blocked when many waiting requests are moved or cancelled at once.

A scheduler's own code runs in this process with two workers that do not respond; one has N waiting requests. It is then
lost or drained, or the router of all requests disconnects; a second task measures the longest time between two turns of
the loop. Then the worker that now has the requests hands back its plan, so that the next plan considers all of them.
Nothing may block the loop for longer than `AIM_MS`, or live workers look silent.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from rich.table import Table

from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.core.plan import Ran
from lorrery.scheduler.messages import StepReport, Submit, WorkerHello
from lorrery.scheduler.routers import RouterLink
from lorrery.scheduler.workers import Dispatcher
from lorrery.service.process import let_collector_rest
from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32

AIM_MS = 50.0
NUM_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class LoopHold:
    """Effect of one event on the loop.

    Attributes:
        what: the event.
        longest_ms: the longest time between two turns of the loop.
        longest_cpu_ms: the same in CPU time of this thread, to which other programs do not add.
        whole_ms: until all requests were placed or cancelled, and planned with.
    """

    what: str
    num_waiting: int
    longest_ms: float
    longest_cpu_ms: float
    whole_ms: float


async def measure(num_waiting: int = NUM_WAITING) -> list[LoopHold]:
    """Measure each event once."""
    let_collector_rest()  # as in a scheduler's process, where the collector skips the modules
    events: dict[str, Callable[[Cluster, Dispatcher, RouterLink], None]] = {
        "worker lost": lambda cluster, worker, router: cluster.detach(worker),
        "worker drains": lambda cluster, worker, router: cluster.drain_worker(worker),
        "router gone": lambda cluster, worker, router: cluster.disconnect(router),
    }
    return [await _measure(what, act, num_waiting) for what, act in events.items()]


async def _measure(what: str, act: Callable[[Cluster, Dispatcher, RouterLink], None], num_waiting: int) -> LoopHold:
    overrides = ["model='Llama-2-7B'", "worker.gpu='A10G'", f"scheduler.max_waiting_requests={2 * num_waiting}"]
    cluster = Cluster(load(None, [*overrides, "scheduler.placement='round_robin'"]), CollectorRegistry())
    router = RouterLink("router", cluster.clock, 10**9)
    plan_ids: dict[str, int] = {}
    first = cluster.attach(_hello("w0"))
    streams = [asyncio.create_task(_read_plans(first, plan_ids))]
    for handle in range(num_waiting):
        _submit(cluster, router, handle)
    await asyncio.sleep(0.05)
    _hand_back(cluster, first, plan_ids)
    second = cluster.attach(_hello("w1"))
    streams.append(asyncio.create_task(_read_plans(second, plan_ids)))
    for handle in range(num_waiting, num_waiting + 20):
        _submit(cluster, router, handle)
    await asyncio.sleep(0.05)
    turns = asyncio.create_task(_longest_turn())
    await asyncio.sleep(0)
    start = time.perf_counter()
    act(cluster, first, router)
    while cluster.core.is_placing or cluster.slices.is_busy:  # noqa: ASYNC110  every turn of the loop is measured
        await asyncio.sleep(0)
    for worker in (first, second):
        if worker.worker_id in cluster.workers:
            _hand_back(cluster, worker, plan_ids)
            await asyncio.sleep(0)
    whole = time.perf_counter() - start
    turns.cancel()
    longest, longest_cpu = await turns
    for stream in streams:
        stream.cancel()
    return LoopHold(what, num_waiting, longest * 1e3, longest_cpu * 1e3, whole * 1e3)


async def _longest_turn() -> tuple[float, float]:
    longest = longest_cpu = 0.0
    last, last_cpu = time.perf_counter(), time.thread_time()
    try:
        while True:
            await asyncio.sleep(0)
            now, now_cpu = time.perf_counter(), time.thread_time()
            longest, longest_cpu = max(longest, now - last), max(longest_cpu, now_cpu - last_cpu)
            last, last_cpu = now, now_cpu
    except asyncio.CancelledError:
        return longest, longest_cpu


def _hello(name: str) -> WorkerHello:
    return WorkerHello(name, "A10G", "Llama-2-7B", 1, 60_000, "roofline", needs_prompts=False)


def _submit(cluster: Cluster, router: RouterLink, handle: int) -> None:
    sampling = pb.Sampling(seed=handle, max_new_tokens=50)
    cluster.requests.submit(Submit(handle, f"r{handle}", "", "t", u32.pack(range(100)), 50, sampling), router)


async def _read_plans(worker: Dispatcher, plan_ids: dict[str, int]) -> None:
    async def write(message: pb.AttachResponse) -> None:
        if message.WhichOneof("message") == "plan":
            plan_ids[worker.worker_id] = message.plan.plan_id

    await worker.outbox.write_all(write)


def _hand_back(cluster: Cluster, worker: Dispatcher, plan_ids: dict[str, int]) -> None:
    now_ps = cluster.clock.now_ps()
    worker.step_done(StepReport(plan_ids[worker.worker_id], now_ps, Ran(0, now_ps), b"", b"", hand_back=True))


def hold_table(rows: Iterable[LoopHold]) -> Table:
    """Show how long the scheduler's loop was blocked."""
    table = Table(title=f"Deep queues: longest time between two turns of the scheduler's loop (aim: {AIM_MS:g} ms)")
    table.add_column("event", no_wrap=True)
    for name in ("waiting", "longest, ms", "of that CPU, ms", "in all, ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        table.add_row(
            r.what, f"{r.num_waiting:,}", f"{r.longest_ms:.0f}", f"{r.longest_cpu_ms:.0f}", f"{r.whole_ms:.0f}"
        )
    return table
