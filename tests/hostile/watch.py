"""What an attack costs a process, as another process sees it.

A probe in the victim's event loop, or in the attacker's process, would measure itself.

async with watched(cluster.processes["router"]) as watch:
    ... the attack, in a further process where it takes CPU ...
figures = await watch.figures(within_seconds=30)

By hand: `python -m tests.hostile.watch PID HOST:PORT [CERTS]`, which prints the figures at the end of its input.
"""

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorrery.service.local.processes import ServiceProcess
from tests.cluster.harness import PATIENCE_SECONDS

_PROBE_SECONDS = 0.01
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Figures:
    """What an attack cost.

    Attributes:
        peak_bytes: most resident memory, over what it was before.
        left_bytes: least resident memory after the attack, over what it was before.
        cpu_seconds: of the process, during the attack.
        gap_seconds: longest time that a health check took, as far as it was CPU time of the process.
        silent_seconds: longest time that one took on the wall clock; on a busy machine not the process's doing.
    """

    peak_bytes: int
    left_bytes: int
    cpu_seconds: float
    gap_seconds: float
    silent_seconds: float


class Watch:
    """A process that watches another one."""

    def __init__(self, watcher: asyncio.subprocess.Process) -> None:
        self._watcher = watcher

    async def figures(self, within_seconds: float = 0.0, left_bytes: int = 0) -> Figures:
        """End the attack's time, and return what it cost.

        Args:
            within_seconds: how long to wait for memory to be given back.
            left_bytes: with how little of it to be content.
        """
        answer, _ = await self._watcher.communicate(f"{within_seconds} {left_bytes}\n".encode())
        return Figures(**json.loads(answer))


@contextlib.asynccontextmanager
async def watched(victim: ServiceProcess, certs: Path | None = None) -> AsyncIterator[Watch]:
    """Watch a service from now on; `certs` is the folder of `lorrery certs` that it has its certificates from."""
    watcher = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.hostile.watch",
        str(victim.pid),
        victim.grpc,
        *([] if certs is None else [str(certs)]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert watcher.stdout is not None
        assert await asyncio.wait_for(watcher.stdout.readline(), PATIENCE_SECONDS) == b"watching\n"
        yield Watch(watcher)
    finally:
        if watcher.returncode is None:
            watcher.kill()
            await watcher.wait()


def _memory(pid: int, name: str) -> int:
    """Return a figure of a process's memory in bytes: VmRSS, or VmHWM, its maximum."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def _channel(address: str, certs: str) -> grpc.Channel:
    if not certs:
        return grpc.insecure_channel(address)
    ca, key, cert = (Path(certs, name).read_bytes() for name in ("ca.pem", "operator.key", "operator.pem"))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert))


def _main(pid: int, address: str, certs: str = "") -> None:
    clock = (~pid << 3) | 2  # CPU time of all threads of a process, clock_getcpuclockid(3)
    ended = threading.Event()
    told: list[float] = []

    def until_told() -> None:
        told.extend(map(float, sys.stdin.readline().split()))
        ended.set()

    with _channel(address, certs) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def probe() -> tuple[float, float]:
            wall, cpu = time.monotonic(), time.clock_gettime(clock)
            health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS, wait_for_ready=True)
            silent = time.monotonic() - wall
            return silent, min(silent, time.clock_gettime(clock) - cpu)

        probe()
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the maximum begins anew
        before, cpu_before = _memory(pid, "VmRSS"), time.clock_gettime(clock)
        print("watching", flush=True)
        threading.Thread(target=until_told, daemon=True).start()
        gap = silent = 0.0
        while not ended.wait(_PROBE_SECONDS):
            one_silent, one_gap = probe()
            gap, silent = max(gap, one_gap), max(silent, one_silent)
        cpu_seconds = time.clock_gettime(clock) - cpu_before
        peak, left = _memory(pid, "VmHWM") - before, _memory(pid, "VmRSS") - before
        within_seconds, content = told or (0, 0)
        end = time.monotonic() + within_seconds
        while time.monotonic() < end and left > content:
            time.sleep(0.1)
            left = min(left, _memory(pid, "VmRSS") - before)
    print(json.dumps(asdict(Figures(peak, left, cpu_seconds, gap, silent))))


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:])
