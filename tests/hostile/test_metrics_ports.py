"""Crowds at the ports without access control: bounded memory, and no gap for others on the service's own port."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.harness import PATIENCE_SECONDS, fork_server, metric, write_settings
from tests.hostile.crowd import KINDS
from tests.hostile.watch import MEGABYTE, watched

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

SECONDS = 1.5
MAX_BYTES = 50 * MEGABYTE
MAX_GAP_SECONDS = 0.25


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    folder = write_settings(tmp_path_factory.mktemp("cluster"))
    async with LocalCluster(folder, num_workers=1, free_ports=True, page=True, fork_server=fork_server()) as cluster:
        yield cluster


@pytest.mark.timing  # on busy cores the thread that writes metrics runs while the one of the streams waits for a core
@pytest.mark.parametrize("kind", KINDS)
async def test_a_crowd_at_a_metrics_port(cluster: LocalCluster, kind: str) -> None:
    router = cluster.processes["router"]
    async with watched(router) as watch:
        await _attack(kind, router.metrics)
        figures = await watch.figures()
    print(f"{kind}: {figures}")
    assert figures.peak_bytes < MAX_BYTES
    assert figures.gap_seconds < MAX_GAP_SECONDS
    # A scraper is answered again at once.
    assert await asyncio.to_thread(metric, router.metrics, "lorrery_service_state", state="ready") == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_crowd_at_the_page(cluster: LocalCluster, kind: str) -> None:
    page = cluster.processes["web"]
    async with watched(replace(page, grpc=cluster.router_address)) as watch:  # it has no gRPC port of its own
        await _attack(kind, page.http)
        figures = await watch.figures()
    print(f"{kind}: {figures}")
    assert figures.peak_bytes < MAX_BYTES
    async with asyncio.timeout(PATIENCE_SECONDS):
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200 "):  # the crowd's connections take a moment to end
            host, _, port = page.http.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /hello HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()


async def _attack(kind: str, address: str) -> None:
    arguments = ("-m", "tests.hostile.crowd", kind, address, str(SECONDS))
    attack = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await attack.communicate()
    print(f"{out.decode().strip()} connections")
