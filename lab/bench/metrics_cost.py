"""Cost of metrics: router and scheduler with all metrics, scraped, compared with the same without any.

Two clusters run, one of which counts nothing (`lab.bench.uncounted`) and is not scraped. The same load runs through
them alternately: 256 streams over 200 adapters and 50 tenants, each of which ends after 64 tokens and is followed by
one with another adapter. Other load on the machine affects both; each pair of windows gives one ratio.

CPU is that of the whole process, the thread that serves scrapes included. Per message for the router, since a message
costs the same whatever it carries; per token for the scheduler and the worker. On a busy machine every instruction
costs more, by up to a half from one window to the next, so each window's figures are also divided by the client's cost
per message in it: one process, which does the same for both clusters. The overhead of metrics is the ratio of those.
"""

import asyncio
import contextlib
import os
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lab.bench import uncounted
from lab.bench.cluster import BenchBrokenError, endless_request, measured_cluster, while_alive
from lab.bench.last_hop import Progress, Window
from lab.bench.meter import Meter
from lab.bench.scrape import fetch
from lorrery.chassis.sections import TlsSettings
from lorrery.loadgen.client import Reception, RouterClient
from lorrery.local.cluster import LocalCluster
from lorrery.local.processes import ForkServer

AIM_RATIO = 0.05
STREAMS, ADAPTERS, TENANTS = 256, 200, 50
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64
SCRAPE_SECONDS = 3.0
"""Time between two scrapes, as in `deploy/prometheus/`."""
SETTLE_SECONDS = 3.0
MAX_PACE_DIFFERENCE = 0.1
OVERRIDES = (f"scheduler.max_num_seqs={STREAMS}", 'adapters.registry=[{id="lora", rank=16, count=200}]')
SERVICES = ("router", "scheduler", "worker")


@dataclass(frozen=True, slots=True)
class MetricsCost:
    """The medians over the repetitions.

    Attributes:
        tokens_per_second: with metrics.
        pace_ratio: tokens/s with metrics / without.
        us: CPU microseconds by process, with metrics: per message for the router, per token for the others.
        uncounted_us: the same without metrics.
        overhead_ratio: by process, the overhead of metrics, relative to the client's cost.
        overheads: of each repetition.
        series: number of series of router and scheduler.
        void: why the figures are void; empty: they are valid.
    """

    tokens_per_second: float
    pace_ratio: float
    us: dict[str, float]
    uncounted_us: dict[str, float]
    overhead_ratio: dict[str, float]
    overheads: dict[str, list[float]]
    series: dict[str, int]
    void: str


async def measure(window_seconds: float, repetitions: int, on_progress: Progress = lambda what: None) -> MetricsCost:
    """Measure both alternately.

    Raises:
        BenchBrokenError: a stream failed, or a service exited.
        LorreryError: a cluster did not start.
    """
    results: list[MetricsCost] = []
    with ForkServer() as counting, ForkServer([str(Path(uncounted.__file__))]) as silent:
        async with measured_cluster(OVERRIDES, counting) as ours, measured_cluster(OVERRIDES, silent) as theirs:

            async def both() -> None:
                pairs = []
                for repetition in range(repetitions):
                    on_progress(f"repetition {repetition + 1} of {repetitions}")
                    first, second = (ours, theirs) if repetition % 2 else (theirs, ours)
                    windows = {
                        cluster: await load_window(cluster, window_seconds, scrape=cluster is ours)
                        for cluster in (first, second)
                    }
                    pairs.append((windows[ours], windows[theirs]))
                results.append(_summary(pairs, {name: await _num_series(ours, name) for name in SERVICES[:2]}))

            await while_alive(ours, while_alive(theirs, both()))
    return results[0]


async def _num_series(cluster: LocalCluster, name: str) -> int:
    text = await asyncio.to_thread(fetch, cluster.metrics_address(name))
    return sum(not line.startswith("#") for line in text.splitlines())


async def load_window(cluster: LocalCluster, seconds: float, *, scrape: bool = False) -> Window:
    """Load a cluster, let it settle, and measure."""
    names = {"worker-0": "worker", "scheduler": "scheduler", "router": "router"}
    pids = {name: cluster.processes[process].pid for process, name in names.items()} | {"client": os.getpid()}
    tokens = messages = 0

    def on_tokens(count: int) -> None:
        nonlocal tokens, messages
        tokens += count
        messages += 1

    async with RouterClient(cluster.router_address, TlsSettings()) as client:
        async with _background([_stream(client, index, on_tokens) for index in range(STREAMS)]) as check:
            await asyncio.sleep(SETTLE_SECONDS)
            async with _background([_scraping(cluster, names)] if scrape else []):
                meter, start = Meter(pids), time.monotonic()
                tokens = messages = 0
                await asyncio.sleep(seconds)
                window = Window(time.monotonic() - start, tokens, messages, meter.read())
            check()
        if not window.tokens:
            raise BenchBrokenError("no token came in a whole window")
        return window


async def _stream(client: RouterClient, index: int, on_tokens: Callable[[int], None]) -> None:
    number = index
    while True:
        request = endless_request(f"stream-{number}", PROMPT_TOKENS, OUTPUT_TOKENS)
        request.adapter_id, request.tenant_id = f"lora-{number % ADAPTERS}", f"tenant-{number % TENANTS}"
        reception = Reception()
        await client.receive(request, reception, timeout_seconds=300.0, on_tokens=on_tokens)
        if reception.status != "OK":
            raise BenchBrokenError(f"a stream ended: {reception.status} {reception.detail}")
        number += STREAMS


async def _scraping(cluster: LocalCluster, processes: dict[str, str]) -> None:
    while True:
        for name in processes:
            await asyncio.to_thread(_scrape, cluster.metrics_address(name))
        await asyncio.sleep(SCRAPE_SECONDS)


def _scrape(address: str) -> None:
    """Read an endpoint as Prometheus does."""
    asked = urllib.request.Request(
        f"http://{address}/metrics",
        headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.3", "Accept-Encoding": "gzip"},
    )
    with urllib.request.urlopen(asked, timeout=10) as response:
        response.read()


@contextlib.asynccontextmanager
async def _background(work: list[Coroutine[Any, Any, None]]) -> AsyncIterator[Callable[[], None]]:
    tasks = [asyncio.create_task(one) for one in work]

    def check() -> None:
        for task in tasks:
            if task.done():
                task.result()

    try:
        yield check
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def cpu_us(window: Window, name: str) -> float:
    """Return a process's CPU: per message for the router, per token for the others."""
    return window.us_per_message(name) if name == "router" else window.us_per_token(name)


def _beside_client(window: Window, name: str) -> float:
    return cpu_us(window, name) / window.us_per_message("client")


def _summary(pairs: list[tuple[Window, Window]], series: dict[str, int]) -> MetricsCost:
    overheads = {
        name: [_beside_client(ours, name) / _beside_client(theirs, name) - 1 for ours, theirs in pairs]
        for name in SERVICES
    }
    pace_ratio = median(ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs)
    void = ""
    if abs(pace_ratio - 1) > MAX_PACE_DIFFERENCE:
        void = "the paces differ"
    elif any(window.client_busy for pair in pairs for window in pair):
        void = "the client was too busy"
    return MetricsCost(
        tokens_per_second=median(ours.tokens_per_second for ours, _ in pairs),
        pace_ratio=pace_ratio,
        us={name: median(cpu_us(ours, name) for ours, _ in pairs) for name in SERVICES},
        uncounted_us={name: median(cpu_us(theirs, name) for _, theirs in pairs) for name in SERVICES},
        overhead_ratio={name: median(values) for name, values in overheads.items()},
        overheads=overheads,
        series=series,
        void=void,
    )
