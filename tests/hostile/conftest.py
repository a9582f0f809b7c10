"""A cluster under attack, and the streams beside the attack, which must not notice it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster

INNOCENT = Ask(seed=5, prompt_tokens=100, max_new_tokens=300)
AFTERWARDS = Ask(seed=6, prompt_tokens=100, max_new_tokens=20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all attacks of a module."""
    async with running_cluster(tmp_path_factory.mktemp("cluster"), num_workers=2) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def attacked(shared_cluster: LocalCluster) -> AsyncIterator[Client]:
    """A client for the attack; streams run beside it, which end well, and no service's stream breaks."""
    async with client_of(shared_cluster) as innocents, client_of(shared_cluster) as client:
        streams = [innocents.start(INNOCENT) for _ in range(4)]
        for stream in streams:
            await stream.at(1)
        yield client
        streams.append(innocents.start(AFTERWARDS))
        for stream in streams:
            assert (await stream).check(shared_cluster.settings).num_requeues == 0
    await nothing_held(shared_cluster)
    assert await scrape(shared_cluster, "router", "lorrery_router_resumed_total") == 0
    assert await scrape(shared_cluster, "scheduler", "lorrery_scheduler_workers_lost_total") == 0
