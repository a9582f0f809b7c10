"""`python -m lab.bench.soak`: memory and file descriptors of every service over time, under load and losses.

Two routers, two schedulers and four workers serve closed loops of short requests, a fifth of which are cancelled, while
adapters are loaded and unloaded again under other ranks. Half of the processes are killed again and again
(`KILLED_EVERY_SECONDS`), so that the others, which live for the whole run, see losses and resume streams. Of those the
table shows how resident memory and open descriptors change: the slope of a straight line, least squares, over the
samples after a warm-up of a sixth of the run, in which caches and pools fill.

Light on purpose (about a tenth of a core in all), so that it can run for an hour beside other things.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from lab.bench import machine
from lab.bench.cluster import CONFIG, BenchBrokenError
from lab.bench.meter import cpu_seconds
from lorrery.chassis.channel import open_channel
from lorrery.chassis.commands import Command, command_app
from lorrery.chassis.sections import TlsSettings
from lorrery.loadgen.client import Reception, RouterClient
from lorrery.loadgen.workload.outcome import OK
from lorrery.local.cluster import LocalCluster
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2

OUT = Path("out") / "soak.json"
SETTINGS = (
    "time_scale=10",  # steps of 140 ms: few, so that requests, losses and adapters are most of what is done
    "scheduler.policy=fcfs",
    "scheduler.memory=paged",
    "scheduler.prefix_cache.kind=blocks",
    "scheduler.max_total_token_num=20000",  # the cache is full after a minute or two
    "scheduler.max_req_total_len=4096",
    "scheduler.max_num_batched_tokens=8192",
    "scheduler.worker_timeout_seconds=10",
    "log.level=error",
)
STREAMS_PER_ROUTER = 8
ADAPTERS = tuple(f"soak-{number}" for number in range(100))
RANKS = (8, 16, 32, 64)
ADAPTER_SECONDS = 1.0
CANCEL_SHARE = 0.2
TIMEOUT_SECONDS = 120.0
KILLED_EVERY_SECONDS = {"worker-1": 60.0, "worker-3": 95.0, "scheduler-1": 240.0, "router-1": 150.0}
"""Processes that are killed and start again; the others live for the whole run."""
WARM_UP_SHARE = 1 / 6

app = command_app()


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time.

    Attributes:
        at_seconds: since the beginning.
        rss_mb: resident memory, pages shared with the process it was forked from included.
        num_fds: open file descriptors.
    """

    at_seconds: float
    rss_mb: float
    num_fds: int


@dataclass(slots=True)
class Series:
    """Samples of one process that lives for the whole run, or of its lives one after another."""

    name: str
    num_lives: int = 1
    cpu_seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def after(self, at_seconds: float) -> list[Sample]:
        """Return the samples from a time on."""
        return [sample for sample in self.samples if sample.at_seconds >= at_seconds]


def slope_per_hour(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through `values`."""
    hours = np.array([sample.at_seconds for sample in samples]) / 3600
    return float(np.polyfit(hours, np.array(values), 1)[0])


@dataclass(slots=True)
class Soak:
    """What a run brought; `outcomes` counts requests by gRPC status, adapters' calls by `load` and `unload`."""

    seconds: float
    outcomes: dict[str, int] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)

    def count(self, outcome: str) -> None:
        """Count one call."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    @property
    def warm_up_seconds(self) -> float:
        """How much of the run is left out of the slopes."""
        return self.seconds * WARM_UP_SHARE


def sample_of(pid: int, at_seconds: float) -> Sample:
    """Read a process's memory and descriptors.

    Raises:
        OSError: it has ended.
    """
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"{pid} has just ended")
    return Sample(at_seconds, int(fields["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")))  # noqa: PTH208  names only


async def run(seconds: float, every_seconds: float, say: Console) -> Soak:
    """Soak a cluster for `seconds`."""
    soak = Soak(seconds)
    async with LocalCluster(CONFIG, SETTINGS, num_workers=2) as cluster:
        await _grow(cluster)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(work)
                for work in (
                    *(_requests(cluster, router, seed, soak) for router in ("router", "router-1") for seed in (1, 2)),
                    _adapters(cluster, soak),
                    *(_losses(cluster, name, every, soak) for name, every in KILLED_EVERY_SECONDS.items()),
                    _ended(cluster),
                )
            ]
            await _sample(cluster, soak, every_seconds, say)
            for one in running:
                one.cancel()
    return soak


async def _grow(cluster: LocalCluster) -> None:
    """Add the second shard with two workers, and a second router; both routers know both shards."""
    await cluster.add("scheduler-1", "scheduler")
    schedulers = [cluster.processes[name].grpc for name in ("scheduler", "scheduler-1")]
    for name in ("worker-2", "worker-3"):
        await cluster.add(name, "worker", [f"worker.name={name}", f"worker.scheduler={schedulers[1]}"])
    listed = f"router.schedulers={json.dumps(schedulers)}"
    cluster.kill("router")
    await cluster.ended("router")
    for name in ("router", "router-1"):
        await cluster.add(name, "router", [listed])
        await cluster.serving(name)


async def _requests(cluster: LocalCluster, router: str, seed: int, soak: Soak) -> None:
    """Send requests in closed loops until cancelled."""
    async with RouterClient(cluster.processes[router].grpc, TlsSettings()) as client, asyncio.TaskGroup() as tasks:
        for number in range(STREAMS_PER_ROUTER // 2):
            tasks.create_task(_one_after_another(client, random.Random(f"{router}/{seed}/{number}"), soak))


async def _one_after_another(client: RouterClient, rng: random.Random, soak: Soak) -> None:
    while True:
        reception = Reception()
        request = router_pb2.GenerateRequest(
            token_ids=router_pb2.TokenIds(ids=[rng.randrange(1, 1000) for _ in range(rng.randint(1, 200))]),
            adapter_id=rng.choice(("", *ADAPTERS[:10])),
            seed=rng.getrandbits(32),
            sampling=types_pb2.SamplingParams(max_new_tokens=rng.randint(2, 40), ignore_eos=True),
        )
        receiving = asyncio.create_task(
            client.receive(request, reception, timeout_seconds=TIMEOUT_SECONDS, on_tokens=lambda _: None)
        )
        try:
            wait = rng.uniform(0.0, 3.0) if rng.random() < CANCEL_SHARE else None
            await asyncio.wait((receiving,), timeout=wait)
        finally:
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving
        soak.count(reception.status or "cancelled")
        if reception.status not in ("", OK):
            await asyncio.sleep(0.5)  # its router is away, or its adapter


async def _adapters(cluster: LocalCluster, soak: Soak) -> None:
    """Load and unload adapters, each time under another rank."""
    rng = random.Random(3)
    loaded: set[str] = set()
    channel = open_channel(cluster.processes["router"].grpc, TlsSettings())
    stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
    try:
        for name in _rounds(rng):
            await asyncio.sleep(ADAPTER_SECONDS)
            if name in loaded:
                await stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(adapter_id=name), timeout=TIMEOUT_SECONDS)
                loaded.remove(name)
                soak.count("unload")
            adapter = types_pb2.Adapter(adapter_id=name, rank=rng.choice(RANKS))
            await stub.LoadAdapter(router_pb2.LoadAdapterRequest(adapter=adapter), timeout=TIMEOUT_SECONDS)
            loaded.add(name)
            soak.count("load")
    finally:
        await channel.close()


def _rounds(rng: random.Random) -> Iterator[str]:
    """Yield every adapter once, then some at random for ever; the first ten, which requests name, more often."""
    yield from ADAPTERS
    while True:
        yield rng.choice(ADAPTERS[:10] if rng.random() < 0.5 else ADAPTERS)


async def _losses(cluster: LocalCluster, name: str, every_seconds: float, soak: Soak) -> None:
    """Kill a process again and again; it starts again at once."""
    for number in itertools.count(2):
        await asyncio.sleep(every_seconds)
        cluster.kill(name)
        await cluster.restart(name)
        soak.series[name].num_lives = number


async def _ended(cluster: LocalCluster) -> None:
    ended = await cluster.unexpected_exit()
    raise BenchBrokenError(f"{ended.name} ended with exit code {ended.exit_code}: {' / '.join(ended.tail)}")


async def _sample(cluster: LocalCluster, soak: Soak, every_seconds: float, say: Console) -> None:
    """Sample every process until the end."""
    start = time.monotonic()
    soak.series = {name: Series(name) for name in cluster.processes}
    while (at_seconds := time.monotonic() - start) < soak.seconds:
        for name, series in soak.series.items():
            with contextlib.suppress(OSError):  # it has just been killed
                series.samples.append(sample_of(cluster.processes[name].pid, at_seconds))
                series.cpu_seconds = cpu_seconds(cluster.processes[name].pid)
        say.print(f"{at_seconds:6.0f} s  {soak.outcomes}", highlight=False)
        await asyncio.sleep(every_seconds)


def table(soak: Soak) -> Table:
    """Show the processes that lived for the whole run, then the others."""
    hours = soak.seconds / 3600
    shown = Table(title=f"Soak: {soak.seconds / 60:.0f} minutes, the first {soak.warm_up_seconds / 60:.0f} left out")
    for column in ("process", "lives", "RSS first, MB", "last", "most", "slope, MB/h", "fds first", "last", "most"):
        shown.add_column(column, justify="left" if column == "process" else "right")
    for column in ("slope, fds/h", "CPU, share of a core"):
        shown.add_column(column, justify="right")
    for series in sorted(soak.series.values(), key=lambda one: (one.name in KILLED_EVERY_SECONDS, one.name)):
        samples = series.after(soak.warm_up_seconds)
        if len(samples) < 2:
            continue
        rss, fds = [sample.rss_mb for sample in samples], [sample.num_fds for sample in samples]
        whole = series.name not in KILLED_EVERY_SECONDS
        shown.add_row(
            series.name,
            str(series.num_lives),
            *(f"{value:.1f}" for value in (rss[0], rss[-1], max(rss))),
            f"{slope_per_hour(samples, rss):+.2f}" if whole else "",
            *(str(value) for value in (fds[0], fds[-1], max(fds))),
            f"{slope_per_hour(samples, fds):+.2f}" if whole else "",
            f"{series.cpu_seconds / (hours * 3600):.1%}" if whole else "",
        )
    return shown


@app.command(cls=Command)
def main(
    minutes: Annotated[float, typer.Option(min=0.5, help="Length of the run.")] = 60.0,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two samples.")] = 30.0,
    out: Annotated[Path, typer.Option(help="File for the JSON with every sample.")] = OUT,
) -> None:
    """Watch memory and file descriptors of every service under load and losses. See docs/benchmarks.md.

    Example:
      python -m lab.bench.soak --minutes 10
    """
    console = Console(width=140)
    facts = machine.facts()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        soak = runner.run(run(minutes * 60, every, console))
    facts["load_average_1m_at_end"] = machine.load_average()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": facts, **asdict(soak)}, indent=1) + "\n", encoding="utf-8")
    console.print(table(soak))
    console.print(soak.outcomes, f"written to {out}", highlight=False)


if __name__ == "__main__":
    app(prog_name="python -m lab.bench.soak")
