"""HTTP/2 connections to gRPC ports that do nothing but send frames, from clients that show no credentials."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Client
from tests.cluster.harness import running_cluster
from tests.hostile.watch import MEGABYTE, watched

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

SECONDS = 60.0
"""More than any of these connections lasts."""
NUM_CONNECTIONS = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """A cluster with a token."""
    folder = tmp_path_factory.mktemp("cluster")
    token = folder / "cluster.token"
    token.write_text("1234567890abcdef\n")
    async with running_cluster(folder, f"cluster_token={token}", num_workers=2) as cluster:
        yield cluster


async def ended_connections(
    attack: str, method: str, address: str, seconds: float = SECONDS, num_connections: int = NUM_CONNECTIONS
) -> int:
    """Perform an attack until the server has ended its connections; return how many it has ended."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.hostile.http2", attack, method, address, str(seconds), str(num_connections)),
        stdout=asyncio.subprocess.PIPE,
    )
    answer, _ = await process.communicate()
    return int(json.loads(answer)["ended"])


@pytest.mark.parametrize(
    ("service", "method"),
    [
        ("router", "/lorrery.v1.RouterService/Generate"),
        ("router", "/no.such.Service/Method"),
        ("scheduler", "/lorrery.v1.SchedulerService/Route"),
        ("scheduler", "/grpc.health.v1.Health/Watch"),
    ],
)
async def test_calls_that_are_reset_at_once(
    attacked: Client, shared_cluster: LocalCluster, service: str, method: str
) -> None:
    process = shared_cluster.processes[service]
    async with watched(process) as watch:
        assert await ended_connections("rapid_reset", method, process.grpc) == NUM_CONNECTIONS
        figures = await watch.figures(within_seconds=30, left_bytes=40 * MEGABYTE)
    assert figures.peak_bytes < 100 * MEGABYTE
    assert figures.left_bytes <= 40 * MEGABYTE


@pytest.mark.parametrize("attack", ["calls", "empty_calls"])
async def test_calls_that_have_no_message(attacked: Client, shared_cluster: LocalCluster, attack: str) -> None:
    process = shared_cluster.processes["router"]
    async with watched(process) as watch:
        method = "/lorrery.v1.RouterService/Generate"
        assert await ended_connections(attack, method, process.grpc) == NUM_CONNECTIONS
        figures = await watch.figures()
    assert figures.peak_bytes < 150 * MEGABYTE


async def test_calls_of_many_connections_that_have_no_message(attacked: Client, shared_cluster: LocalCluster) -> None:
    """257 calls on each of 80 connections, so that none sends more than its share of bytes; the gap was 3.8 s."""
    process = shared_cluster.processes["router"]
    async with watched(process) as watch:
        method = "/lorrery.v1.RouterService/Generate"
        assert await ended_connections("few_calls", method, process.grpc, seconds=10, num_connections=80) > 5
        figures = await watch.figures(within_seconds=30, left_bytes=60 * MEGABYTE)
    assert figures.peak_bytes < 450 * MEGABYTE  # gRPC's core keeps 20,000 calls that Python has not taken yet
    assert figures.gap_seconds < 1.5
    assert figures.left_bytes <= 60 * MEGABYTE


@pytest.mark.parametrize(
    "attack",
    [
        "made_reset",
        "settings",
        "pings",
        "acknowledgements",
        "windows",
        "priorities",
        "empty_data",
        "resets",
        "continuations",
        "unknown",
    ],
)
async def test_frames_that_are_no_call(attacked: Client, shared_cluster: LocalCluster, attack: str) -> None:
    process = shared_cluster.processes["router"]
    async with watched(process) as watch:
        method = "/lorrery.v1.RouterService/Generate"
        assert await ended_connections(attack, method, process.grpc) == NUM_CONNECTIONS
        figures = await watch.figures()
    assert figures.peak_bytes < 100 * MEGABYTE
