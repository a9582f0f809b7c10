"""Whether the wall clock keeps the model's pace, measured at the client by the arrival of tokens.

The load: a batch of 32 on one worker, continuous batching, steps of about 15 ms. One stream, the *probe*, lasts for the
whole run; the other 31 are closed loops of requests of mixed lengths, so that every few steps a sequence ends and
another arrives, and every arrival is a prefill step during which all others wait.

Definition. The probe gets one token in each decode step. On a fresh cluster whose first request it is, its token number
n (from 0, which is its prefill) belongs to the scheduler's n-th decode step. Two scrapes of the scheduler's
`step_seconds` give, after n1 and n2 decode steps, the sums S1 and S2 of all modelled steps so far, prefills included.
With a(n) the client's monotonic time when token n arrived, and N the number of steps between, of either kind:

    wall-clock mean step = (a(n2) - a(n1)) / N        modelled mean step = (S2 - S1) / N

Both sides refer to the same steps, nothing is clustered or guessed, and time in which the worker stood still (*gaps*,
which the model does not have) counts as wall-clock time. A prefill that ended between decode step n and the scrape is
in S and not in a(n): at most one step in the thousands of the window. A pause just at the start or end of the window
would count in full, so five scrapes are made around either end, and the median over the 25 pairs is reported, with the
minimum and maximum.

The run is void if the client used more than 80 % of a core. The aim is 1 %, or 2 % if the event loop of any of the four
processes waited for a core for more than 10 % of the time.
"""

import asyncio
import os
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise, product
from statistics import median

import numpy as np
from rich.console import Group
from rich.table import Table

from lab.bench.cluster import BenchBrokenError, endless_request, measured_cluster, while_alive
from lab.bench.marks import meets, ms, notes_below, percent
from lab.bench.meter import BUSY_SHARE, Meter, Usage
from lab.bench.scrape import Reading, fetch
from lorrery.loadgen.client import RouterClient
from lorrery.loadgen.reception import Reception
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.settings.sections import TlsSettings

BATCH = 32
PROMPT_TOKENS = 128
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 16, 256
SETTLE_SECONDS = 2.0
NUM_EDGE_SCRAPES, EDGE_SCRAPE_SECONDS = 5, 0.5
SHORTEST_SECONDS = 8.0
_FASTEST_STEP_SECONDS = 0.005  # the probe must outlast the run
_STEP = "lorrery_scheduler_step_seconds"


@dataclass(frozen=True, slots=True)
class _Look:
    """The services' counters at one moment, between the two times."""

    before_seconds: float
    after_seconds: float
    scheduler: Reading
    worker: Reading
    router: Reading

    @property
    def num_decodes(self) -> int:
        return round(self.scheduler.total(f"{_STEP}_count", kind="decode"))

    @property
    def num_steps(self) -> int:
        return round(self.scheduler.total(f"{_STEP}_count"))

    @property
    def modelled_seconds(self) -> float:
        return self.scheduler.total(f"{_STEP}_sum")


@dataclass(slots=True)
class _Run:
    """Data of the client."""

    probe: Reception = field(default_factory=Reception)
    ended: list[Reception] = field(default_factory=list)
    starts: list[_Look] = field(default_factory=list)
    ends: list[_Look] = field(default_factory=list)
    usage: dict[str, Usage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One run's figures. Ratios are wall clock / model - 1, so above 0 is too slow.

    Attributes:
        window_seconds: from the first to the last scrape.
        num_steps: steps between a scrape at the window's start and one at its end, median.
        num_decode_steps: decode steps, equal to the probe's tokens.
        num_requests: requests that ended in the whole run.
        mean_batch: sequences in a decode step.
        wall_step_seconds: the wall-clock mean step.
        modelled_step_seconds: the modelled one.
        error_ratio: median over the pairs of scrapes, accompanied by the minimum and maximum.
        gap_ratio: time in which the worker stood still though it had a plan / wall time.
        num_gaps: number of such gaps.
        late_interrupts: arrivals that took effect later than the core's rule says.
        worker_lag_seconds: (p50, p99) of the delay in noticing a step's end; wall, from histogram buckets.
        router_lag_seconds: (p50, p99) of tokens' lateness in the router; wall, from histogram buckets.
        client_gap_seconds: (p50, p99, max) between two tokens of the probe, prefill steps included.
        usage: of router, scheduler, worker, client.
        run_queue_delay_ratio: the largest of the four; None if the kernel does not report it.
        aim_ratio: 0.01, or 0.02 on a busy machine.
        void: why the figures are void; empty if they are valid.
    """

    window_seconds: float
    num_steps: float
    num_decode_steps: float
    num_requests: int
    mean_batch: float
    wall_step_seconds: float
    modelled_step_seconds: float
    error_ratio: float
    least_error_ratio: float
    most_error_ratio: float
    gap_ratio: float
    num_gaps: int
    late_interrupts: int
    worker_lag_seconds: tuple[float | None, float | None]
    router_lag_seconds: tuple[float | None, float | None]
    client_gap_seconds: tuple[float, float, float]
    usage: dict[str, Usage]
    run_queue_delay_ratio: float | None
    aim_ratio: float
    void: str


async def measure(seconds: float) -> Fidelity:
    """Run for `seconds` of wall time, at least `SHORTEST_SECONDS`, plus about ten for starting and stopping.

    Raises:
        BenchBrokenError: a stream failed or returned a wrong number of tokens, or a service exited.
        LorreryError: the cluster did not start.
    """
    seconds = max(seconds, SHORTEST_SECONDS)
    run = _Run()
    async with (
        measured_cluster([f"scheduler.max_num_seqs={BATCH}"]) as cluster,
        RouterClient(cluster.router_address, TlsSettings()) as client,
    ):
        await client.cluster(10.0)
        await while_alive(cluster, _load(cluster, client, run, seconds))
    return _evaluate(run)


async def _load(cluster: LocalCluster, client: RouterClient, run: _Run, seconds: float) -> None:
    """Load the cluster, scrape at both ends of the window, and stop."""
    timeout_seconds = seconds + 60.0
    num_probe_tokens = round((seconds + SETTLE_SECONDS + 10.0) / _FASTEST_STEP_SECONDS)
    first_token = asyncio.Event()
    probe_request = endless_request("probe", PROMPT_TOKENS, num_probe_tokens)
    tasks = [
        asyncio.create_task(
            client.receive(
                probe_request, run.probe, timeout_seconds=timeout_seconds, on_tokens=lambda _: first_token.set()
            )
        )
    ]
    try:
        async with asyncio.timeout(10.0):
            await first_token.wait()
        tasks += [
            asyncio.create_task(_closed_loop(client, index, run.ended, timeout_seconds)) for index in range(BATCH - 1)
        ]
        window = asyncio.create_task(_window(cluster, run, seconds))
        tasks.append(window)
        # Only the window ends normally; a loop that ends has failed.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        if not window.done():
            raise BenchBrokenError(f"the probe ended early: {run.probe.status} {run.probe.detail}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _closed_loop(client: RouterClient, index: int, ended: list[Reception], timeout_seconds: float) -> None:
    rng = np.random.default_rng(index)
    while True:
        num_tokens = int(rng.integers(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS, endpoint=True))
        request = endless_request(f"loop-{index}", PROMPT_TOKENS, num_tokens)
        reception = Reception()
        await client.receive(request, reception, timeout_seconds=timeout_seconds, on_tokens=lambda _: None)
        received = sum(reception.message_tokens)
        if reception.status != "OK" or received != num_tokens:
            raise BenchBrokenError(
                f"a stream brought {received} of {num_tokens} tokens: {reception.status} {reception.detail}"
            )
        ended.append(reception)


async def _window(cluster: LocalCluster, run: _Run, seconds: float) -> None:
    await asyncio.sleep(SETTLE_SECONDS)
    pids = {name: cluster.processes[name].pid for name in ("router", "scheduler")}
    meter = Meter({**pids, "worker": cluster.processes["worker-0"].pid, "client": os.getpid()})
    start = time.monotonic()
    edge_seconds = (NUM_EDGE_SCRAPES - 1) * EDGE_SCRAPE_SECONDS
    for looks, begin in ((run.starts, start), (run.ends, start + seconds - edge_seconds)):
        for index in range(NUM_EDGE_SCRAPES):
            await asyncio.sleep(max(0.0, begin + index * EDGE_SCRAPE_SECONDS - time.monotonic()))
            looks.append(await _look(cluster))
    run.usage = meter.read()
    # The tokens of the last counted steps are still in transit.
    await asyncio.sleep(1.0)


async def _look(cluster: LocalCluster) -> _Look:
    before = time.monotonic()
    scheduler = await asyncio.to_thread(fetch, cluster.metrics_address("scheduler"))
    after = time.monotonic()
    worker = await asyncio.to_thread(fetch, cluster.metrics_address("worker-0"))
    router = await asyncio.to_thread(fetch, cluster.metrics_address("router"))
    return _Look(before, after, Reading.parse(scheduler), Reading.parse(worker), Reading.parse(router))


def _evaluate(run: _Run) -> Fidelity:
    arrivals = _token_arrivals(run.probe)
    for look in (*run.starts, *run.ends):
        _check_alignment(arrivals, look)
    errors, walls, modelled, steps, decodes = [], [], [], [], []
    for start, end in product(run.starts, run.ends):
        wall = arrivals[end.num_decodes] - arrivals[start.num_decodes]
        model = end.modelled_seconds - start.modelled_seconds
        num_steps = end.num_steps - start.num_steps
        errors.append(wall / model - 1)
        walls.append(wall / num_steps)
        modelled.append(model / num_steps)
        steps.append(num_steps)
        decodes.append(end.num_decodes - start.num_decodes)

    first, last = run.starts[0], run.ends[-1]
    window_seconds = last.before_seconds - first.before_seconds
    scheduler = last.scheduler.since(first.scheduler)
    worker = last.worker.since(first.worker)
    router = last.router.since(first.router)
    # Every request's first token comes from its prefill, all others from decode steps.
    decoded = scheduler.total("lorrery_scheduler_output_tokens_total")
    decoded -= scheduler.total("lorrery_scheduler_time_to_first_token_seconds_count")
    delays = [usage.run_queue_delay_ratio for usage in run.usage.values() if usage.run_queue_delay_ratio is not None]
    delay = max(delays, default=None)
    client_share = run.usage["client"].cpu_share
    gaps = [b - a for a, b in pairwise(arrivals[first.num_decodes : last.num_decodes + 1])]
    p50, p99, most = np.quantile(gaps, [0.5, 0.99, 1.0]).tolist()
    return Fidelity(
        window_seconds=window_seconds,
        num_steps=median(steps),
        num_decode_steps=median(decodes),
        num_requests=len(run.ended),
        mean_batch=decoded / scheduler.total(f"{_STEP}_count", kind="decode"),
        wall_step_seconds=median(walls),
        modelled_step_seconds=median(modelled),
        error_ratio=median(errors),
        least_error_ratio=min(errors),
        most_error_ratio=max(errors),
        gap_ratio=worker.total("lorrery_worker_gap_seconds_total") / window_seconds,
        num_gaps=round(worker.total("lorrery_worker_gaps_total")),
        late_interrupts=round(scheduler.total("lorrery_scheduler_late_interrupts_total")),
        worker_lag_seconds=_p50_p99(worker, "lorrery_worker_lag_seconds"),
        router_lag_seconds=_p50_p99(router, "lorrery_router_lag_wall_seconds"),
        client_gap_seconds=(p50, p99, most),
        usage=run.usage,
        run_queue_delay_ratio=delay,
        aim_ratio=0.02 if delay is not None and delay > 0.1 else 0.01,
        void=f"the client used {client_share:.0%} of a core" if client_share > BUSY_SHARE else "",
    )


def _token_arrivals(reception: Reception) -> list[float]:
    """Return when each token arrived, by its number."""
    arrivals: list[float] = []
    for at, count in zip(reception.message_seconds, reception.message_tokens, strict=True):
        arrivals += [at] * count
    return arrivals


def _check_alignment(arrivals: list[float], look: _Look) -> None:
    """Check that the probe's token numbers are the scheduler's decode steps.

    The scheduler counts a step before it sends its tokens, so at the start of a scrape the client had no token of a
    later step, and a second later it has those of all counted steps.

    Raises:
        BenchBrokenError: they differ.
    """
    newest = bisect_right(arrivals, look.before_seconds) - 1
    if newest > look.num_decodes:
        raise BenchBrokenError(f"the client has token {newest} of the probe after {look.num_decodes} decode steps")
    if look.num_decodes >= len(arrivals):
        raise BenchBrokenError(f"token {look.num_decodes} of the probe has not arrived within a second")


def _p50_p99(reading: Reading, name: str) -> tuple[float | None, float | None]:
    return reading.quantile(name, 0.5), reading.quantile(name, 0.99)


def fidelity_table(result: Fidelity) -> Group:
    """Show the pace and the conditions of the run."""
    table = Table(title="Fidelity: the wall clock at the client against the model", show_header=False)
    verdict = "[red]void[/]" if result.void else meets(abs(result.error_ratio) <= result.aim_ratio)
    load = (
        f"{result.window_seconds:.0f} s, {result.num_steps:.0f} steps ({result.num_decode_steps:.0f} decode),"
        f" batch {result.mean_batch:.1f}, {result.num_requests} requests ended"
    )
    difference = (
        f"[bold]{result.error_ratio:+.3%}[/] ({result.least_error_ratio:+.3%} to {result.most_error_ratio:+.3%}"
        f" by where the window is cut); aim: within {result.aim_ratio:.0%}, {verdict}"
    )
    rows = [
        ("load", load),
        ("mean step, wall clock", f"{result.wall_step_seconds * 1e3:.4f} ms"),
        ("mean step, modelled", f"{result.modelled_step_seconds * 1e3:.4f} ms"),
        ("difference", difference),
        ("difference without gaps", f"{result.error_ratio - result.gap_ratio:+.3%}"),
        (
            "gaps (worker stood still)",
            f"{result.num_gaps}, {result.gap_ratio:.3%} of the time; {result.late_interrupts} late interrupts",
        ),
        ("worker lag p50, p99", ms(result.worker_lag_seconds)),
        ("router lag p50, p99", ms(result.router_lag_seconds)),
        ("probe's token gaps p50, p99, most", ms(result.client_gap_seconds)),
        (
            "cores used",
            ", ".join(f"{name} {usage.cpu_share:.0%}" for name, usage in result.usage.items()),
        ),
        (
            "waited for a core",
            ", ".join(f"{name} {percent(usage.run_queue_delay_ratio)}" for name, usage in result.usage.items()),
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return Group(table, *notes_below(result.void, result.run_queue_delay_ratio))
