"""Whatever is sent to a port, and however often: little is logged, without a traceback, and the service goes on."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import start_python
from tests.cluster.harness import PATIENCE_SECONDS, fork_server, metric, wait_until, write_settings
from tests.router.test_access import ROOT, entry

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

MAX_LOG_BYTES = 64_000
"""What the log of a port may grow by, however much it is sent."""
SECONDS = 1.5
COLLECTOR = "tracing.endpoint=http://127.0.0.1:1"  # where nobody listens, so that spans are made and lost


class Logged:
    """What the processes of a cluster print."""

    def __init__(self) -> None:
        self.text = ""

    def show(self, name: str, line: str) -> None:
        self.text += f"{name} | {line}\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["open", "keys"])
async def logged_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[LocalCluster, Logged]]:
    """A cluster with a page and tracing; everybody's, or with keys and a token."""
    folder = tmp_path_factory.mktemp("cluster")
    overrides = [COLLECTOR]
    if request.param == "keys":
        (folder / "keys.toml").write_text(ROOT + entry("acme-secret", name="acme-1", tenant="acme"))
        (folder / "token").write_text("0123456789abcdef" * 4)
        overrides += [f"router.keys={folder}/keys.toml", f"cluster_token={folder}/token"]
    logged = Logged()
    cluster = LocalCluster(
        write_settings(folder),
        overrides,
        num_workers=1,
        show=logged.show,
        free_ports=True,
        fork_server=fork_server(),
        page=True,
    )
    async with cluster:
        yield cluster, logged


async def _run(module: str, *arguments: str) -> str:
    """Run an attack in a process of its own; return what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"tests.hostile.{module}", *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


@pytest.mark.parametrize(
    "port",
    ["router http", "router grpc", "router metrics", "scheduler grpc", "scheduler metrics", "worker-0 grpc",
     "worker-0 metrics", "web http"],
)  # fmt: skip
async def test_malformed_things_by_the_thousand(logged_cluster: tuple[LocalCluster, Logged], port: str) -> None:
    cluster, logged = logged_cluster
    name, _, kind = port.partition(" ")
    before = len(logged.text)
    num_sent = int(await _run("malformed", getattr(cluster.processes[name], kind), str(SECONDS)))
    await asyncio.sleep(0.5)  # what is logged a little later counts as well
    grown = logged.text[before:]
    print(f"{port}: {num_sent} sent, {len(grown)} bytes logged")
    assert "Traceback" not in grown
    assert len(grown) < MAX_LOG_BYTES
    for process in cluster.processes.values():
        assert process.exit_code is None
    for process in ("router", "scheduler", "worker-0"):
        assert metric(cluster.metrics_address(process), "lorrery_service_state", state="ready") == 1
        await cluster.serving(process)


@pytest.mark.parametrize("stream", ["stdout", "stderr", "both"])
async def test_a_service_whose_log_has_no_room_serves_on(tmp_path: Path, stream: str) -> None:
    """Its standard streams are on a full disk. tests/service/test_standard_streams.py: it says later what it lost."""
    announce = tmp_path / "addresses"
    arguments = ["-m", "lorrery.scheduler", "--config", str(write_settings(tmp_path)), "--announce", str(announce)]
    full = os.open("/dev/full", os.O_WRONLY)
    process = await start_python(
        arguments,
        stdout=full if stream != "stderr" else asyncio.subprocess.DEVNULL,
        stderr=full if stream != "stdout" else asyncio.subprocess.DEVNULL,
    )
    os.close(full)
    try:
        await wait_until(announce.exists)
        address = json.loads(announce.read_text())["grpc"]
        await _run("malformed", address, "1")
        assert process.returncode is None
        clock = (~process.pid << 3) | 2  # as in watch.py

        async def rests() -> bool:
            begun = time.clock_gettime(clock)
            await asyncio.sleep(1.0)
            return time.clock_gettime(clock) - begun < 0.3

        await wait_until(rests)  # it does not spin
        async with grpc.aio.insecure_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service="liveness")
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        process.terminate()
    assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0
