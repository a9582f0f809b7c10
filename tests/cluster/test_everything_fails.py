"""Workers and the scheduler come and go under load, and clients cancel: the streams that are read lose no token."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, client_of, mixed_asks
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster, wait_until

pytestmark = pytest.mark.cluster

AT_ONCE = 48
ADAPTERS = ("", "lora-0", "lora-1", "lora-2", "lora-3", "big", "loaded-later")


class Crowd:
    """Clients that send one request after another, and now and then cancel one."""

    def __init__(self, cluster: LocalCluster, client: Client, asks: Iterator[Ask]) -> None:
        self.num_checked = 0
        self.num_cancelled = 0
        self.num_requeues = 0
        self._cluster, self._client, self._asks = cluster, client, asks
        self._stopping = False

    async def more(self, num_streams: int) -> None:
        """Return once so many more streams have ended well."""
        target = self.num_checked + num_streams
        await wait_until(lambda: self.num_checked >= target, 60.0, f"{num_streams} more streams")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for seed in range(AT_ONCE):
                tasks.create_task(self._one_after_another(random.Random(seed)))
            yield
            self._stopping = True

    async def _one_after_another(self, rng: random.Random) -> None:
        while not self._stopping:
            stream = self._client.start(next(self._asks))
            if rng.random() < 0.2:
                await stream.at(rng.randint(0, 20))
                stream.cancel()
                await stream
                self.num_cancelled += 1
            else:
                usage = (await stream).check(self._cluster.settings)
                self.num_requeues += usage.num_requeues
                self.num_checked += 1
            self._client.streams.remove(stream)


async def _workers_are(cluster: LocalCluster, count: int) -> None:
    async def so() -> bool:
        return await scrape(cluster, "scheduler", "lorrery_scheduler_workers", state="ready") == count

    await wait_until(so, what=f"{count} workers attached")


async def test_no_token_is_lost_while_everything_fails(start_cluster: StartCluster):
    cluster = await start_cluster(
        "scheduler.policy=req_queue",
        "scheduler.max_total_token_num=8000",
        "scheduler.worker_timeout_seconds=3.0",
        "worker.heartbeat_seconds=0.1",
        "worker.drain_seconds=0.5",
        num_workers=2,
    )
    asks = iter(mixed_asks(20_000, random.Random(3), prompt=(1, 200), output=(20, 150), adapters=ADAPTERS))
    async with client_of(cluster) as client:
        await client.load_adapter("loaded-later", 8)
        crowd = Crowd(cluster, client, asks)
        async with crowd.running():
            await crowd.more(10)
            cluster.kill("worker-0")  # and while its streams move to the other:
            cluster.kill("scheduler")
            await cluster.restart("scheduler")
            await cluster.restart("worker-0")
            await _workers_are(cluster, 2)
            await crowd.more(30)
            cluster.kill("worker-1", signal.SIGSTOP)
            await _workers_are(cluster, 1)
            cluster.kill("worker-0", signal.SIGTERM)  # the last one, which drains for half a second
            await cluster.ended("worker-0")
            cluster.kill("worker-1", signal.SIGCONT)
            await _workers_are(cluster, 1)
            await crowd.more(30)
            # A worker that is not heard while its scheduler dies, and hears later of neither.
            cluster.kill("worker-1", signal.SIGSTOP)
            cluster.kill("scheduler")
            await cluster.restart("scheduler")
            cluster.kill("worker-1", signal.SIGCONT)
            await cluster.restart("worker-0")
            await _workers_are(cluster, 2)
            await crowd.more(30)
        print(f"{crowd.num_checked} streams, {crowd.num_cancelled} cancelled, {crowd.num_requeues} requeues")
        assert crowd.num_cancelled > 0
        assert crowd.num_requeues > 0
        await nothing_held(cluster)
        # Some were cancelled too late.
        ok = await scrape(cluster, "router", "lorrery_router_requests_total", outcome="ok")
        cancelled = await scrape(cluster, "router", "lorrery_router_requests_total", outcome="cancelled")
        assert crowd.num_checked <= ok <= crowd.num_checked + crowd.num_cancelled
        assert await scrape(cluster, "router", "lorrery_router_requests_total") == ok + cancelled
