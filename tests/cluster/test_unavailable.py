"""Without a worker, or without a scheduler, requests wait as long as the settings say, and then fail."""

import asyncio

import grpc
import pytest

from tests.cluster.client import Ask, client_of
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import StartCluster

pytestmark = pytest.mark.cluster


async def test_no_worker_and_no_scheduler_are_unavailable_after_their_waits(start_cluster: StartCluster):
    cluster = await start_cluster(
        "scheduler.worker_wait_seconds=0.4", "router.resume_timeout_seconds=0.3", num_workers=0
    )
    async with client_of(cluster) as client:
        refused = await asyncio.gather(*(client.failure(Ask(seed)) for seed in range(3)))
        for code, message in refused:
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "no worker" in message
            assert "0.4 s (worker_wait_seconds)" in message
        await nothing_held(cluster)

        cluster.kill("scheduler")
        await cluster.ended("scheduler")
        for code, message in await asyncio.gather(*(client.failure(Ask(seed)) for seed in range(3))):
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "0.3 s (resume_timeout_seconds)" in message
            assert cluster.scheduler_address in message
        with pytest.raises(grpc.aio.AioRpcError, match="no scheduler is connected") as caught:
            await client.adapters()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await nothing_held(cluster, without=["scheduler"])
