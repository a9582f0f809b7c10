"""Resource use of each service as a cluster grows: more GPUs, more streams, more routers, more shards.

Each case is a separate cluster that decodes endless streams over gRPC at the same rate of tokens, so that cases differ
in how tokens are split into steps and messages and which processes handle them, not in their number. GPUs are hosted by
worker processes of up to `GPUS_PER_PROCESS`. The figures are CPU time of all processes of a service over the window, by
token and by step; the client is this process and does not parse anything. Cases alternate, round by round, and medians
of the rounds are reported.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from statistics import median

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.bench.cluster import BenchBrokenError, measured_cluster
from lab.bench.meter import BUSY_SHARE, Meter
from lab.bench.scrape import Reading, fetch
from lab.bench.streams import StreamCount, grpc_streams
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ForkServer

GPUS_PER_PROCESS = 8
TOKENS_PER_SECOND = 2000
SETTLE_SECONDS = 2.0
JOIN_SECONDS = 60.0
SERVICES = ("router", "scheduler", "worker")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A size of cluster.

    Attributes:
        gpus: workers, hosted by as few processes as possible, with at least one for each shard.
        streams: streams that decode at the same time.
        routers: streams are distributed over them evenly.
        shards: schedulers; worker processes are assigned to them in turn.
        tokens_per_second: of all streams; determines the step length.
    """

    gpus: int
    streams: int
    routers: int = 1
    shards: int = 1
    tokens_per_second: float = TOKENS_PER_SECOND

    @property
    def step_ms(self) -> float:
        """Length of a step."""
        return 1000 * self.streams / self.tokens_per_second


CASES = (
    *(Case(gpus, 128) for gpus in (1, 4, 16, 64)),
    *(Case(8, streams) for streams in (16, 512, 2000)),
    *(Case(8, 512, routers=routers) for routers in (2, 4)),
    *(Case(16, 512, shards=shards) for shards in (1, 2, 4)),
)


@dataclass(frozen=True, slots=True)
class Use:
    """Resource use of a service in a window.

    Attributes:
        processes: number of processes of the service.
        cpu_seconds: of all of them.
        lag_seconds: p99 in the process where it is highest; None: the service has no lag metric.
    """

    processes: int
    cpu_seconds: float
    lag_seconds: float | None


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window.

    Attributes:
        seconds: its length.
        tokens: tokens written by routers.
        steps: of all GPUs.
        uses: by service.
        client_share: share of a core used by the client.
    """

    seconds: float
    tokens: float
    steps: float
    uses: dict[str, Use]
    client_share: float


@dataclass(frozen=True, slots=True)
class Scaled:
    """The windows of one case."""

    case: Case
    windows: list[Window]

    def median(self, value: Callable[[Window], float]) -> float:
        """Return the median of a value over the windows."""
        return median(map(value, self.windows))

    def cores(self, service: str) -> float:
        """Return the number of cores that a service uses, all its processes together."""
        return self.median(lambda window: window.uses[service].cpu_seconds / window.seconds)

    def us_per_token(self, service: str) -> float:
        """Return CPU microseconds of a service per token."""
        return self.median(lambda window: window.uses[service].cpu_seconds / window.tokens * 1e6)

    def us_per_step(self, service: str) -> float:
        """Return CPU microseconds of a service per step of a GPU."""
        return self.median(lambda window: window.uses[service].cpu_seconds / window.steps * 1e6)

    def lag_ms(self, service: str) -> float:
        """Return a service's lateness at p99, in milliseconds."""
        return self.median(lambda window: (window.uses[service].lag_seconds or 0.0) * 1e3)

    @property
    def void(self) -> str:
        """Why the figures are void; empty if they are valid."""
        busy = max(window.client_share for window in self.windows)
        return f"the client took {busy:.0%} of a core" if busy > BUSY_SHARE else ""


async def measure(window_seconds: float, rounds: int, on_progress: Progress = lambda what: None) -> list[Scaled]:
    """Measure each case once per round.

    Raises:
        BenchBrokenError: a stream failed or ended, or a service does not find the others.
        LorreryError: a cluster did not start.
    """
    found = [Scaled(case, []) for case in CASES]
    with ForkServer() as fork_server:
        for number in range(rounds):
            for one in found:
                on_progress(f"{one.case}, round {number + 1} of {rounds}")
                async with cluster_of(one.case, fork_server) as (cluster, routers):
                    one.windows.append(await _window(cluster, routers, one.case.streams, window_seconds))
    return found


@contextlib.asynccontextmanager
async def cluster_of(
    case: Case, fork_server: ForkServer, *further: str
) -> AsyncIterator[tuple[LocalCluster, list[str]]]:
    """Run a cluster of this size, with further settings; yield it with the names of its routers."""
    gpus = min(GPUS_PER_PROCESS, case.gpus // case.shards)
    overrides = [
        f"scheduler.max_num_seqs={2 * -(-case.streams // case.gpus)}",  # streams are not spread quite evenly
        f"worker.gpus={gpus}",
        "worker.step_time=constant",
        f"worker.constant.step_ms={case.step_ms:g}",
        "scheduler.placement=least_loaded",
        *further,
    ]
    async with measured_cluster(overrides, fork_server) as cluster:
        shards = {"scheduler": cluster.scheduler_address}
        for number in range(1, case.shards):
            await cluster.add(name := f"scheduler-{number}", "scheduler")
            shards[name] = cluster.processes[name].grpc
        addresses = list(shards.values())
        for number in range(1, case.gpus // gpus):
            scheduler = addresses[number % len(addresses)]
            await cluster.add(
                f"worker-{number}", "worker", [f"worker.scheduler={scheduler}", f"worker.name=worker-{number}"]
            )
        routers = ["router"]
        if case.routers > 1 or case.shards > 1:
            routers = [f"router-{number}" for number in range(1, case.routers + 1)]
            for name in routers:
                await cluster.add(name, "router", [f"router.schedulers={addresses}".replace("'", '"')])
        for name in [*cluster.processes]:
            if cluster.processes[name].service != "scheduler":
                await cluster.serving(name)
        for name in routers:
            await _reached(cluster, name, "lorrery_router_shard_connected", len(shards))
        yield cluster, routers


async def _reached(cluster: LocalCluster, process: str, metric: str, wanted: int) -> None:
    """Wait until a process's metric reaches a value."""
    end = time.monotonic() + JOIN_SECONDS
    while True:
        if await _read(cluster, process, metric) == wanted:
            return
        if time.monotonic() > end:
            raise BenchBrokenError(f"{metric} of {process} did not come to {wanted} in {JOIN_SECONDS:g} s")
        await asyncio.sleep(0.1)


async def _read(cluster: LocalCluster, process: str, metric: str) -> float:
    return Reading.parse(await asyncio.to_thread(fetch, cluster.metrics_address(process))).total(metric)


async def _window(cluster: LocalCluster, routers: list[str], num_streams: int, seconds: float) -> Window:
    counted = {name: one for name, one in cluster.processes.items() if one.service != "router" or name in routers}
    async with contextlib.AsyncExitStack() as stack:
        counts: list[StreamCount] = [
            await stack.enter_async_context(
                grpc_streams(cluster.processes[name].grpc, num_streams // len(routers), num_streams)
            )
            for name in routers
        ]
        await asyncio.sleep(SETTLE_SECONDS)
        before = await texts_of(cluster, counted)
        meter = Meter({name: one.pid for name, one in counted.items()} | {"client": os.getpid()})
        await asyncio.sleep(seconds)
        usage = meter.read()
        after = await texts_of(cluster, counted)
        if failures := [count.failure for count in counts if count.failure]:
            raise BenchBrokenError(f"a stream failed: {failures[0]}")
    window_seconds = usage["client"].wall_seconds
    shown = {name: Reading.parse(after[name][1]).since(Reading.parse(before[name][1])) for name in counted}
    of = {service: [name for name, one in counted.items() if one.service == service] for service in SERVICES}

    def grown(service: str, metric: str) -> float:
        """Return the growth of a service's metric in the window, at its rate between scrapes, which take time."""
        return sum(
            shown[name].total(metric) / (after[name][0] - before[name][0]) * window_seconds for name in of[service]
        )

    lags = {"router": "lorrery_router_lag_wall_seconds", "worker": "lorrery_worker_lag_seconds"}
    uses = {
        service: Use(
            len(names),
            sum(usage[name].cpu_seconds for name in names),
            max((shown[name].quantile(lags[service], 0.99) or 0.0 for name in names), default=None)
            if service in lags
            else None,
        )
        for service, names in of.items()
    }
    return Window(
        window_seconds,
        grown("router", "lorrery_router_output_tokens_total"),
        grown("worker", "lorrery_worker_steps_total"),
        uses,
        usage["client"].cpu_share,
    )


async def texts_of(cluster: LocalCluster, names: Iterable[str]) -> dict[str, tuple[float, str]]:
    """Return the metrics text of each process, and the time of the scrape."""

    def text_of(name: str) -> tuple[float, str]:
        return time.monotonic(), fetch(cluster.metrics_address(name))

    return {name: await asyncio.to_thread(text_of, name) for name in names}


def scale_table(found: Iterable[Scaled]) -> Group:
    """Show the resource use of each service, by size of cluster."""
    table = Table(title="Scale: CPU of all processes of a service, at one rate of tokens; lag at p99", padding=0)
    names = ["GPUs", "streams", "routers", "shards", "tokens/s", "steps/s"]
    names += [f"{service}\ncores" for service in ("router", "schedul.", "worker")]
    names += ["router\nus/token", "schedul.\nus/step", "worker\nus/step", "router\nlag, ms", "worker\nlag, ms"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    notes: list[Text] = []
    for one in found:
        case = one.case
        table.add_row(
            *(f"{size:,}" for size in (case.gpus, case.streams, case.routers, case.shards)),
            f"{one.median(lambda window: window.tokens / window.seconds):,.0f}",
            f"{one.median(lambda window: window.steps / window.seconds):,.0f}",
            *(f"{one.cores(service):.2f}" for service in SERVICES),
            f"{one.us_per_token('router'):.0f}",
            f"{one.us_per_step('scheduler'):,.0f}",
            f"{one.us_per_step('worker'):,.0f}",
            f"{one.lag_ms('router'):.1f}",
            f"{one.lag_ms('worker'):.1f}",
        )
        if one.void:
            notes.append(Text(f"void: {case}: {one.void}", style="bold red"))
    return Group(table, *notes)
