"""Lateness of workers with many GPUs on two cores: 32 with steps of 30 ms, and 64 with steps of 60 ms.

A worker's lag is the time from the end of a step until its process notices. Much of it is the machine's, so alongside
each window a process that only sleeps, waking as often as a worker's process has steps to end, measures its own
lateness, and the time that the services waited for a core is reported. Workers run with real-time priority, if the
system grants it, and as ordinary processes, in turn. The cluster is that of `lab.bench.scale`, with eight GPUs per
process and 128 streams over one router; all of it, client included, runs on the same cores.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from lab.bench.bare_process import in_own_process
from lab.bench.cluster import BenchBrokenError
from lab.bench.machine import load_average
from lab.bench.meter import Meter
from lab.bench.scale import GPUS_PER_PROCESS, SERVICES, SETTLE_SECONDS, Case, cluster_of, texts_of
from lab.bench.scrape import Reading
from lab.bench.streams import grpc_streams
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ForkServer

STREAMS = 128
CASES = tuple(Case(gpus, STREAMS, tokens_per_second=STREAMS / seconds) for gpus, seconds in ((32, 0.03), (64, 0.06)))
REALTIME = ("auto", "off")
"""Values of `worker.realtime` that are compared."""
AIM_SECONDS = 0.002
LAG = "lorrery_worker_lag_seconds"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window.

    Attributes:
        steps_per_second: of all GPUs.
        lag_seconds: (p50, p99) of all steps, from histogram buckets.
        in_time_ratio: share of steps that were at most `AIM_SECONDS` late.
        slept_seconds: (p50, p99) lateness of a process that only sleeps.
        cores: CPU by service, all its processes together.
        waited_ratio: largest share of time that a worker's process waited for a core; None if the kernel does not
            report it.
        load_average: of the last minute.
    """

    steps_per_second: float
    lag_seconds: tuple[float, float]
    in_time_ratio: float
    slept_seconds: tuple[float, float]
    cores: dict[str, float]
    waited_ratio: float | None
    load_average: float


@dataclass(frozen=True, slots=True)
class Lagging:
    """The windows of one case, with workers of one kind."""

    case: Case
    realtime: str
    windows: list[Window]

    def median(self, value: Callable[[Window], float]) -> float:
        """Return the median of a value over the windows."""
        return median(map(value, self.windows))


async def measure(seconds: float, rounds: int, on_progress: Progress = lambda what: None) -> list[Lagging]:
    """Measure each case once per round.

    Raises:
        BenchBrokenError: a stream failed or ended.
        LorreryError: a cluster did not start.
    """
    found = [Lagging(case, realtime, []) for case in CASES for realtime in REALTIME]
    with ForkServer() as fork_server:
        for number in range(rounds):
            for one in found:
                setting = f"worker.realtime={one.realtime}"
                on_progress(f"{one.case.gpus} GPUs, {setting}, round {number + 1} of {rounds}")
                async with cluster_of(one.case, fork_server, setting) as (cluster, _):
                    one.windows.append(await _window(cluster, one.case, seconds))
    return found


async def _window(cluster: LocalCluster, case: Case, seconds: float) -> Window:
    processes = cluster.processes
    workers = [name for name, one in processes.items() if one.service == "worker"]
    async with grpc_streams(cluster.router_address, case.streams) as count:
        await asyncio.sleep(SETTLE_SECONDS)
        before = await texts_of(cluster, workers)
        meter = Meter({name: one.pid for name, one in processes.items()} | {"client": os.getpid()})
        slept_seconds = await _lateness(seconds, case.step_ms / 1000 / GPUS_PER_PROCESS)
        usage = meter.read()
        after = await texts_of(cluster, workers)
    if count.failure:
        raise BenchBrokenError(f"a stream failed: {count.failure}")
    lag = Reading({})
    for name in workers:
        lag = lag.plus(Reading.parse(after[name][1]).since(Reading.parse(before[name][1])))
    steps = lag.total(f"{LAG}_count")
    p50, p99 = lag.quantile(LAG, 0.5), lag.quantile(LAG, 0.99)
    if p50 is None or p99 is None:
        raise BenchBrokenError("no step has ended")
    waited = [usage[name].run_queue_delay_ratio for name in workers]
    cores = {
        service: sum(usage[name].cpu_share for name, one in processes.items() if one.service == service)
        for service in SERVICES
    }
    return Window(
        steps / (after[workers[0]][0] - before[workers[0]][0]),
        (p50, p99),
        lag.total(f"{LAG}_bucket", le=f"{AIM_SECONDS:g}") / steps,
        slept_seconds,
        {**cores, "client": usage["client"].cpu_share},
        max((ratio for ratio in waited if ratio is not None), default=None),
        load_average(),
    )


async def _lateness(seconds: float, period_seconds: float) -> tuple[float, float]:
    """Return the p50 and p99 lateness, in seconds, of a separate process that only sleeps."""
    p50, p99 = json.loads(await in_own_process("lab.bench.bare_sleeps", f"{seconds:g}", f"{period_seconds:g}"))
    return p50, p99


def lag_table(found: Iterable[Lagging]) -> Table:
    """Show how late workers were, next to a process that only sleeps."""
    aim_ms = AIM_SECONDS * 1e3
    table = Table(title=f"Worker lag (aim: p99 under {aim_ms:g} ms), and a process that only sleeps", padding=0)
    names = ["GPUs", "step, ms", "real-\ntime", "steps/s", "lag p50,\nms", "p99,\nms", f"within\n{aim_ms:g} ms"]
    names += ["sleeps p50,\nms", "p99,\nms", "waited for\na core", "load\naverage"]
    names += [f"{service}\ncores" for service in (*SERVICES, "client")]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            f"{one.case.gpus}",
            f"{one.case.step_ms:g}",
            one.realtime,
            f"{one.median(lambda window: window.steps_per_second):,.0f}",
            f"{one.median(lambda window: window.lag_seconds[0]) * 1e3:.2f}",
            f"{one.median(lambda window: window.lag_seconds[1]) * 1e3:.2f}",
            f"{one.median(lambda window: window.in_time_ratio):.2%}",
            f"{one.median(lambda window: window.slept_seconds[0]) * 1e3:.2f}",
            f"{one.median(lambda window: window.slept_seconds[1]) * 1e3:.2f}",
            f"{one.median(lambda window: window.waited_ratio or 0.0):.1%}",
            f"{one.median(lambda window: window.load_average):.1f}",
            *(f"{one.median(lambda window: window.cores[name]):.2f}" for name in (*SERVICES, "client")),  # noqa: B023
        )
    return table
