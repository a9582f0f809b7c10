"""`python -m lab.bench.page`: CPU cost of rendering the orrery's page, in headless Chromium.

A synthetic feed of 64 workers, each with 32 sequences that all change, ten times a second; the page from the real
server. Chromium without a GPU rasters on the CPU, so the figures include what a user's GPU would do. Not part of
`python -m lab.bench`: it needs a browser.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from playwright.sync_api import Browser, CDPSession
from rich.console import Console
from rich.table import Table

from lab.bench import machine
from lab.bench.marks import machine_line
from lab.screenshots.browser import browser, page_of
from lorrery.chassis.commands import Command, command_app
from lorrery.chassis.web_server import WebServer
from lorrery.orrery import frame as f
from lorrery.orrery.app import make_app

WARM_UP_MS = 5_000
STEP_SECONDS = 0.02
POOL = 100_000
NUM_ADAPTERS = 200
MAX_LORAS = 8
NUM_TENANTS = 12
AIM_FRAME_MS = 1000 / 60

app = command_app()


class FullFeed:
    """A feed of workers with full batches, in which 3 % of all sequences end between two frames."""

    def __init__(self, num_workers: int, batch: int) -> None:
        self._num_workers, self._batch = num_workers, batch

    async def hello(self) -> f.Hello:
        """Describe the feed."""
        return f.Hello("live", "llama-2-7b", f"{self._num_workers} workers, {self._batch} sequences each", "bench")

    async def frames(self, hz: float = 10.0) -> AsyncIterator[f.Frame]:
        """Yield frames in wall time."""
        begun, number = time.monotonic(), 0
        while True:
            yield self._frame(number, 100.0 + number / hz)
            number += 1
            await asyncio.sleep(max(0.0, begun + number / hz - time.monotonic()))

    def _frame(self, number: int, at: float) -> f.Frame:
        workers = [self._worker(n, number, at) for n in range(self._num_workers)]
        tokens = sum(worker.tokens for worker in workers)
        ended = [
            f.EndedRow(number * 1000 + n, n, n, n % NUM_TENANTS, 300, 165, at - 4, 0.3, 0.1, 0.2, 3.4, "length")
            for n in range(self._num_workers)
        ]
        return f.Frame(
            at=at,
            adapters_new=[f"lora-{n}" for n in range(NUM_ADAPTERS)] if not number else [],
            tenants_new=[f"tenant-{n}" for n in range(NUM_TENANTS)] if not number else [],
            shards=[f.Shard("127.0.0.1:50051", connected=True)],
            workers=workers,
            unplaced=0,
            held=0,
            tenants=[f.TenantRow(n, 170, 20, 1.0, tokens // NUM_TENANTS, 0) for n in range(NUM_TENANTS)],
            adapters=[f.AdapterRow(n, 10, 1, 20 + number // 20, number // 20, 0) for n in range(NUM_ADAPTERS)],
            totals=f.Totals(requests=number * 64, finished=number * 64, output_tokens=tokens),
            ended=ended,
            ended_more=0,
            events=[f.EventRow(at, "load", f"lora-{number % NUM_ADAPTERS} comes to worker-0")],
            events_more=0,
        )

    def _worker(self, worker: int, number: int, at: float) -> f.Worker:
        running = []
        for place in range(self._batch):
            life, born = divmod(number + place * 7 + worker, 33)  # frames that a sequence lasts: 165 tokens
            request = worker + self._num_workers * (place + self._batch * life)
            running.append(f.RunningRow(request, request % NUM_ADAPTERS, request % NUM_TENANTS, 300, 5 * born))
        first = worker + number // 20
        resident = [
            f.ResidentRow((first + n) % NUM_ADAPTERS, f.IN_USE if n else f.LOADING, 16, 0.2) for n in range(MAX_LORAS)
        ]
        return f.Worker(
            id=f"worker-{worker}",
            shard=0,
            gpu="A100-80GB-SXM",
            tp=1,
            state="ready",
            running=running,
            waiting=worker % 9,
            oldest=0.5,
            kv=POOL * (worker + 20) // 100,
            pool=POOL,
            adapters=resident,
            host=40,
            step=STEP_SECONDS,
            kind="decode",
            tokens=int(at / STEP_SECONDS) * self._batch,
            busy=at,
            preempted=0,
        )


@dataclass(frozen=True, slots=True)
class PageCost:
    """One measured window.

    Attributes:
        frames: number of animation frames.
        delta_ms: time between two of them: median, 95th and 99th percentile.
        script_ms: JavaScript in the page's main thread, per animation frame.
        main_ms: that thread in total: script, layout, recording of paint operations.
        cpu_ms: all of Chromium's processes, raster and compositing included.
        heap_mb: JavaScript's heap at the end.
    """

    frames: int
    delta_ms: tuple[float, float, float]
    script_ms: float
    main_ms: float
    cpu_ms: float
    heap_mb: float


@contextmanager
def served(feed: FullFeed) -> Iterator[str]:
    """Serve the page from another thread; yield its address."""
    loop = asyncio.new_event_loop()
    server = WebServer(make_app(feed), "127.0.0.1:0", "bench")
    address = server.listen()
    serving = loop.create_task(server.run())

    def run() -> None:
        try:
            loop.run_until_complete(serving)
        except asyncio.CancelledError:
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://{address}/"
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()


def measure(running: Browser, url: str, seconds: float, width: int, height: int) -> PageCost:
    """Measure the page for `seconds`."""
    with page_of(running, url, width=width, height=height, dark=True) as page:
        page.wait_for_timeout(WARM_UP_MS)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        whole = running.new_browser_cdp_session()
        before, cpu = _metrics(session), _cpu_seconds(whole)
        deltas: list[float] = page.evaluate(
            """(seconds) => new Promise((resolve) => {
              const deltas = [];
              let last = performance.now();
              const end = last + seconds * 1000;
              const tick = (now) => {
                deltas.push(now - last);
                last = now;
                if (now < end) requestAnimationFrame(tick); else resolve(deltas.slice(1));
              };
              requestAnimationFrame(tick);
            })""",
            seconds,
        )
        after, cpu = _metrics(session), _cpu_seconds(whole) - cpu
    number = len(deltas)
    ordered = sorted(deltas)
    p50, p95, p99 = (ordered[int(q * (number - 1))] for q in (0.5, 0.95, 0.99))
    return PageCost(
        frames=number,
        delta_ms=(p50, p95, p99),
        script_ms=1000 * (after["ScriptDuration"] - before["ScriptDuration"]) / number,
        main_ms=1000 * (after["TaskDuration"] - before["TaskDuration"]) / number,
        cpu_ms=1000 * cpu / number,
        heap_mb=after["JSHeapUsedSize"] / 1e6,
    )


def _metrics(session: CDPSession) -> dict[str, float]:
    return {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}


def _cpu_seconds(session: CDPSession) -> float:
    return sum(float(each["cpuTime"]) for each in session.send("SystemInfo.getProcessInfo")["processInfo"])


@app.command(cls=Command)
def main(
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences running on each.")] = 32,
    seconds: Annotated[float, typer.Option(min=1, help="Length of a measurement window.")] = 10.0,
) -> None:
    """Measure frames a second and CPU per frame of the orrery's page, without a GPU.

    Examples:
      python -m lab.bench.page
      python -m lab.bench.page --workers 8 --seconds 5
    """
    console = Console()
    console.print(machine_line(machine.facts()))
    table = Table(title=f"The orrery's page: {workers} workers with {batch} sequences each, 10 feed frames a second")
    for name in (
        "window",
        "frames/s",
        "between frames p50, p95, p99",
        "script",
        "main thread",
        "all of Chromium",
        "heap",
    ):
        table.add_column(name, justify="right")
    with browser() as running, served(FullFeed(workers, batch)) as url:
        for width, height in ((1440, 900), (2560, 1440)):
            cost = measure(running, url, seconds, width, height)
            table.add_row(
                f"{width} x {height}",
                f"{cost.frames / seconds:.1f}",
                ", ".join(f"{delta:.1f}" for delta in cost.delta_ms) + " ms",
                f"{cost.script_ms:.2f} ms",
                f"{cost.main_ms:.2f} ms",
                f"{cost.cpu_ms:.1f} ms",
                f"{cost.heap_mb:.0f} MB",
            )
    console.print(table)
    console.print(
        f"script, main thread, all of Chromium: CPU per animation frame; 60 a second leave {AIM_FRAME_MS:.1f} ms"
    )


if __name__ == "__main__":
    app(prog_name="python -m lab.bench.page")
