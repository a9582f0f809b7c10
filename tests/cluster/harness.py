"""Clusters of real processes for tests, and how a test waits for something to come true.

async def test_something(start_cluster):
    cluster = await start_cluster("scheduler.max_waiting_requests=2", num_workers=2)
    ... cluster.router_address, cluster.kill("worker-0"), await cluster.restart("worker-0") ...
    await wait_until(lambda: metric(cluster.metrics_address("scheduler"), "lorrery_scheduler_workers") == 2)
"""

import asyncio
import atexit
import contextlib
import functools
import inspect
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families

from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ForkServer

POLL_SECONDS = 0.02
PATIENCE_SECONDS = 60.0
"""Bounds waits that must end by themselves: on a busy machine any process may stand still for seconds."""

# No time-out here is short: where one must fire, or a worker that hangs be noticed, the test says so itself.
SETTINGS = """
format = 1
model = "Llama-3-8B"

[adapters]
registry = [{ id = "lora", rank = 16, count = 4 }, { id = "big", rank = 64 }]

[scheduler]
listen = "127.0.0.1:0"
metrics = "127.0.0.1:0"
max_req_input_len = 2048
max_req_total_len = 4096
worker_timeout_seconds = 60.0
worker_wait_seconds = 60.0
drain_seconds = 5.0

[worker]
listen = "127.0.0.1:0"
metrics = "127.0.0.1:0"
gpu = "H100-SXM"
heartbeat_seconds = 0.2
drain_seconds = 5.0

[router]
listen = "127.0.0.1:0"
metrics = "127.0.0.1:0"
http = "127.0.0.1:0"
resume_timeout_seconds = 60.0
drain_seconds = 5.0
"""


class StartCluster(Protocol):
    """The `start_cluster` fixture: `overrides` as for `--set`."""

    async def __call__(self, *overrides: str, num_workers: int | None = None) -> LocalCluster: ...


@contextlib.asynccontextmanager
async def running_cluster(folder: Path, *overrides: str, num_workers: int | None = None) -> AsyncIterator[LocalCluster]:
    """Run a cluster with small, quick settings on free ports; its output goes to the test's."""
    async with LocalCluster(
        write_settings(folder),
        overrides,
        num_workers,
        show=lambda name, line: print(f"{name} | {line}"),
        fork_server=fork_server(),
    ) as cluster:
        yield cluster


@functools.cache
def fork_server() -> ForkServer:
    """Return what all clusters of this process fork their services from, so that these are imported once."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def write_settings(folder: Path, text: str = SETTINGS) -> Path:
    """Write a settings file into `folder` and return its path."""
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def metric(address: str, name: str, **labels: str) -> float:
    """Return what a process's Prometheus endpoint shows now: the sum of the samples that have these labels.

    Args:
        address: HOST:PORT of the endpoint.
        name: of the sample, so with `_total`, `_count` or `_sum` where it has one.
        labels: those to match; others do not matter. No sample that matches gives 0.

    Raises:
        LookupError: there is no such metric.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    known = False
    total = 0.0
    for family in families:
        known = known or name.startswith(family.name)
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
    if not known:
        raise LookupError(f"{address} shows no metric {name}; it has {sorted(family.name for family in families)}")
    return total


@contextlib.contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    """Let processes that are started inside ignore a signal."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


async def wait_until(
    predicate: Callable[[], bool | Awaitable[bool]], timeout_seconds: float = PATIENCE_SECONDS, what: str = ""
) -> None:
    """Return as soon as `predicate` is true.

    Raises:
        AssertionError: it was not within `timeout_seconds`.
    """
    end = time.monotonic() + timeout_seconds
    while True:
        answer = predicate()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < end, (
            f"not within {timeout_seconds:g} s: {what or inspect.getsource(predicate).strip()}"
        )
        await asyncio.sleep(POLL_SECONDS)


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended but was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def descendants(pid: int) -> dict[int, str]:
    """Return what `pid` has started, and what that has: pid and Python module, or an empty name."""
    found: dict[int, str] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # those that end meanwhile
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            command = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").split()
            found[child] = command[command.index("-m") + 1] if "-m" in command else ""
            found |= descendants(child)
    return found


def services(pid: int) -> dict[int, str]:
    """Return pid and name of the services among the descendants of `pid`."""
    names = {f"lorrery.{name}": name for name in ("router", "scheduler", "worker")}
    return {child: names[module] for child, module in descendants(pid).items() if module in names}
