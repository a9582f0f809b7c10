import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lorrery.local.cluster import LocalCluster, start_python
from tests.cluster.harness import StartCluster, alive, metric, wait_until, write_settings

pytestmark = pytest.mark.cluster

SERVICES = 4  # scheduler, two workers, router


class Up:
    """`lorrery up` as a process, and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    @classmethod
    async def start(cls, *arguments: str) -> "Up":
        pipe = asyncio.subprocess.PIPE
        return cls(
            await start_python(["-m", "lorrery.cli", "up", *arguments], stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        )

    async def wait_for(self, text: str) -> str:
        """Return the next line that contains `text`."""
        while text not in (line := await self._line()):
            assert line, f"ended without {text!r}:\n{''.join(self.lines)}"
        return line

    async def end(self) -> int:
        """Return the exit code, once it has ended."""
        while await self._line():
            pass
        return await self.process.wait()

    async def _line(self) -> str:
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        self.lines.append(line)
        return line

    def services(self) -> dict[int, str]:
        """Return pid and module of the child processes."""
        pid = self.process.pid
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        commands = {child: Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0") for child in children}
        return {child: command[command.index(b"-m") + 1].decode() for child, command in commands.items()}

    def pid_of(self, service: str) -> int:
        return next(pid for pid, name in self.services().items() if name == service)


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Up]:
    """A cluster of `lorrery up` that serves."""
    running = await Up.start("--config", str(write_settings(tmp_path)), "--workers", "2")
    try:
        await running.wait_for("try: lorrery load --target")
        yield running
    finally:
        if running.process.returncode is None:
            running.process.kill()
        await running.end()


async def test_up_tells_where_things_are_and_one_ctrl_c_stops_them_in_order(up: Up):
    pids = up.services()
    assert sorted(pids.values()) == ["router", "scheduler", "worker", "worker"]
    text = "".join(up.lines)
    for name in ("router", "scheduler", "worker-0", "worker-1"):
        match = re.search(rf"lorrery +\|   {name} +(127\.0\.0\.1:\d+) +http://(127\.0\.0\.1:\d+)/metrics", text)
        assert match, text
        assert metric(match[2], "lorrery_service_state", state="ready") == 1

    up.process.send_signal(signal.SIGINT)
    assert await up.end() == 0, "".join(up.lines)
    assert not [pid for pid in pids if alive(pid)]
    stopped = [line.split("|")[0].strip() for line in up.lines if re.search(r"\bstopped\b", line)]
    assert stopped[0] == "router"
    assert set(stopped[1:3]) == {"worker-0", "worker-1"}
    assert stopped[3:] == ["scheduler"]


async def test_sigterm_stops_everything_too(up: Up):
    pids = up.services()
    up.process.send_signal(signal.SIGTERM)
    assert await up.end() == 0
    assert not [pid for pid in pids if alive(pid)]


async def test_no_process_survives_a_killed_parent(up: Up):
    pids = up.services()
    assert len(pids) == SERVICES
    up.process.kill()
    await wait_until(lambda: not any(alive(pid) for pid in pids))


async def test_cluster_stops_when_nobody_reads_its_output(tmp_path: Path):
    read, write = os.pipe()
    process = await start_python(
        ["-m", "lorrery.cli", "up", "--config", str(write_settings(tmp_path)), "--workers", "1"],
        stdout=write,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(write)
    os.close(read)
    _, error = await process.communicate()
    assert process.returncode in (0, 128 + signal.SIGTERM)
    assert error == b""


@pytest.mark.parametrize("victim", ["scheduler", "worker", "router"])
async def test_process_that_dies_is_named_and_ends_the_rest(up: Up, victim: str):
    pids = up.services()
    killed = await asyncio.create_subprocess_exec("kill", "-KILL", str(up.pid_of(victim)))
    await killed.wait()
    line = await up.wait_for("ended unexpectedly with signal 9; stopping the rest")
    assert victim in line
    assert await up.end() == 1
    assert not [pid for pid in pids if alive(pid)]


async def test_second_ctrl_c_kills_what_does_not_stop(up: Up):
    pids = up.services()
    stopped = await asyncio.create_subprocess_exec("kill", "-STOP", str(up.pid_of("router")))
    await stopped.wait()
    up.process.send_signal(signal.SIGINT)
    router = up.pid_of("router")
    # The first one has been taken note of once the router has a SIGTERM pending.
    await wait_until(lambda: _pending(router, signal.SIGTERM), what="SIGTERM pending")
    up.process.send_signal(signal.SIGINT)
    assert await up.end() == 130
    assert not [pid for pid in pids if alive(pid)]


def _pending(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return any(
        int(mask, 16) >> (number - 1) & 1 for mask in re.findall(r"^(?:ShdPnd|SigPnd):\s*(\w+)", status, re.MULTILINE)
    )


async def test_wrong_setting_is_one_line_and_exit_code_2(tmp_path: Path):
    up = await Up.start("--config", str(write_settings(tmp_path)), "--set", "scheduler.polici=x")
    assert await up.end() == 2
    assert up.lines == ["lorrery: error: scheduler.polici: no such setting (--set)\n", ""]


async def test_service_that_cannot_start_ends_everything(tmp_path: Path):
    up = await Up.start("--config", str(write_settings(tmp_path)), "--set", "worker.gpu=Abacus")
    assert await up.end() == 1
    text = "".join(up.lines)
    assert re.search(r"worker-\d ended with exit code", text)
    assert "Abacus" in text
    assert "Traceback" not in text


async def test_killed_process_starts_again_on_its_ports(start_cluster: StartCluster):
    cluster: LocalCluster = await start_cluster()
    before = cluster.processes["scheduler"]
    cluster.kill("scheduler")
    assert await cluster.ended("scheduler") == -signal.SIGKILL
    await cluster.restart("scheduler")
    after = cluster.processes["scheduler"]
    assert (after.grpc, after.metrics) == (before.grpc, before.metrics)
    assert after.pid != before.pid
    await cluster.serving("router")


def test_fixed_worker_ports_count_up():
    cluster = LocalCluster(None, ["worker.listen=127.0.0.1:0", "worker.metrics=127.0.0.1:9103"], 3)
    overrides = [cluster._worker_overrides(index, "host:1") for index in range(3)]
    assert overrides[0] == ["worker.scheduler=host:1", "worker.listen=127.0.0.1:0", "worker.metrics=127.0.0.1:9103"]
    assert [override[2] for override in overrides[1:]] == [
        "worker.metrics=127.0.0.1:9104",
        "worker.metrics=127.0.0.1:9105",
    ]
