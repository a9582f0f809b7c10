"""The time of day of one host jumps, by ten seconds either way; no stream notices. Each service is a host here."""

import asyncio
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lorrery.service.settings.cluster import load
from tests.cluster.client import Ask, Client
from tests.cluster.harness import metric, wait_until, write_settings

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler and Linux"),
]
JUMP_SECONDS = (10, -10)
JUMP_TOKENS = 300
"""So long each lasts: 4.2 s of steps, more than the time-out for workers."""
OVERRIDES = ("scheduler.policy=fcfs", "scheduler.worker_timeout_seconds=4", "time_scale=2")


class Host:
    """One service's process, and its time of day."""

    def __init__(self, folder: Path, name: str) -> None:
        self.announcement, self._shift = folder / f"{name}.json", folder / f"{name}.shift"
        self.jump(0)
        self.environment = {"LD_PRELOAD": str(folder / "wall_clock.so"), "WALL_CLOCK_SHIFT": str(self._shift)}
        self._name = name

    def jump(self, seconds: int) -> None:
        """Let the time of day be that of the others, plus so much."""
        with self._shift.open("r+b" if self._shift.exists() else "wb") as file:
            file.write(struct.pack("q", seconds))

    @contextlib.asynccontextmanager
    async def running(self, config: Path, *overrides: str) -> AsyncIterator[dict[str, str]]:
        """Run the service; yield where it listens."""
        command = [sys.executable, "-m", f"lorrery.{self._name}", "--config", str(config)]
        command += ["--announce", str(self.announcement)]
        for override in (*OVERRIDES, *overrides):
            command += ["--set", override]
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | self.environment)
        try:
            await wait_until(self.announcement.exists, 60)
            yield json.loads(self.announcement.read_text())
        finally:
            process.kill()
            await process.wait()


@pytest.fixture
def hosts(tmp_path: Path) -> list[Host]:
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "wall_clock.so", source, "-ldl"], check=True)
    hosts = [Host(tmp_path, name) for name in ("scheduler", "worker", "router")]
    hosts[0].jump(10**6)
    command = [sys.executable, "-c", "import time; print(time.time())"]
    said = subprocess.check_output(command, env=os.environ | hosts[0].environment)
    assert float(said) > 10**6 + source.stat().st_mtime  # a process does see it
    hosts[0].jump(0)
    return hosts


@pytest.mark.timeout(300)
async def test_a_jump_of_one_hosts_time_of_day_costs_no_stream(tmp_path: Path, hosts: list[Host]) -> None:
    config = write_settings(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(hosts[0].running(config))
        address = scheduler["grpc"]
        await stack.enter_async_context(hosts[1].running(config, f"worker.scheduler={address}"))
        router = await stack.enter_async_context(hosts[2].running(config, f"router.schedulers={json.dumps([address])}"))
        client = await stack.enter_async_context(Client(router["grpc"]))
        streams = [client.start(Ask(seed, 20, 4000), timeout=300) for seed in range(8)]
        await asyncio.gather(*(stream.at(5) for stream in streams))
        settings = load(config, OVERRIDES)
        for host in hosts:
            for seconds in JUMP_SECONDS:
                host.jump(seconds)
                before = min(len(stream.token_ids) for stream in streams)
                await asyncio.gather(*(stream.at(before + JUMP_TOKENS) for stream in streams))
            host.jump(0)
        assert not any(stream.over for stream in streams)  # all jumps were seen by all
        for stream in streams:
            stream.check_so_far(settings)
        for name in ("workers_lost_total", "orphaned_requests_total", "requeued_sequences_total"):
            assert await asyncio.to_thread(metric, scheduler["metrics"], f"lorrery_scheduler_{name}") == 0
        assert await asyncio.to_thread(metric, router["metrics"], "lorrery_router_resumed_total") == 0
