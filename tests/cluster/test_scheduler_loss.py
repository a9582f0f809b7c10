"""The scheduler dies mid-stream and starts again on its ports: no token lost or repeated."""

import asyncio
import random
from functools import partial

import pytest

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, Stream, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster, wait_until

pytestmark = pytest.mark.cluster

NUM_STREAMS = 32
ADAPTERS = ("", "lora-0", "lora-1", "lora-2", "lora-3", "big", "loaded-later")


def _start_streams(client: Client, seed: int, count: int, output: int) -> list[Stream]:
    rng = random.Random(seed)
    return [
        client.start(Ask(rng.getrandbits(64), rng.randint(1, 200), rng.randint(output, 2 * output), adapter))
        for adapter in rng.choices(ADAPTERS, k=count)
    ]


async def _scheduler_has_had(cluster: LocalCluster, num_requests: int) -> bool:
    ended = await scrape(cluster, "scheduler", "lorrery_scheduler_requests_total")
    return ended + await scrape(cluster, "scheduler", "lorrery_scheduler_in_flight_requests") >= num_requests


async def _kill_scheduler(cluster: LocalCluster) -> None:
    cluster.kill("scheduler")
    await cluster.ended("scheduler")

    async def router_knows() -> bool:
        return await scrape(cluster, "router", "lorrery_router_shard_connected") == 0

    await wait_until(router_knows)


async def test_killed_scheduler_loses_and_repeats_no_token(start_cluster: StartCluster):
    # Some are in a batch, some wait.
    cluster = await start_cluster("scheduler.policy=fcfs", "scheduler.max_num_seqs=12", num_workers=2)
    async with client_of(cluster) as client:
        await client.load_adapter("loaded-later", 8)
        streams = _start_streams(client, 1, NUM_STREAMS, 300)
        await wait_until(lambda: sum(len(stream.token_ids) >= 5 for stream in streams) >= 12)
        await wait_until(partial(_scheduler_has_had, cluster, NUM_STREAMS))  # one that comes later is not resumed
        await _kill_scheduler(cluster)
        # Nothing ends now; on a busy machine some have ended before.
        resumed = NUM_STREAMS - await scrape(cluster, "router", "lorrery_router_requests_total", outcome="ok")
        assert resumed > 0
        held_back = _start_streams(client, 2, 8, 10)
        assert sum(not stream.over for stream in streams) >= resumed
        assert not any(stream.over for stream in held_back)
        assert (await client.shards())[0].connected is False
        await cluster.restart("scheduler")
        for stream in (*streams, *held_back):
            (await stream).check(cluster.settings)
        assert (await client.adapters())["loaded-later"] == 8
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_workers", state="ready") == 2
        assert await scrape(cluster, "router", "lorrery_router_resumed_total") == resumed
    await nothing_held(cluster)


async def test_requests_cancelled_while_the_scheduler_is_away_do_not_come_back(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs")
    async with client_of(cluster) as client:
        streams = _start_streams(client, 3, 8, 600)
        streams = [stream for stream in streams if stream.ask.adapter_id != "loaded-later"]
        await asyncio.gather(*(stream.at(5) for stream in streams))
        await _kill_scheduler(cluster)
        for stream in streams[1:]:
            stream.cancel()
            await stream

        async def one_waits() -> bool:
            return await scrape(cluster, "router", "lorrery_router_waiting_for_shard_requests") == 1

        await wait_until(one_waits)
        await cluster.restart("scheduler")
        (await streams[0]).check(cluster.settings)
    await nothing_held(cluster)
    assert await scrape(cluster, "scheduler", "lorrery_scheduler_requests_total") == 1


async def test_requests_that_waited_are_not_refused_by_the_next_scheduler(start_cluster: StartCluster):
    cluster = await start_cluster(
        "scheduler.policy=fcfs", "scheduler.max_num_seqs=8", "scheduler.max_waiting_requests=8"
    )
    async with client_of(cluster) as client:
        running = [client.start(Ask(seed, 10, 800)) for seed in range(8)]
        await asyncio.gather(*(stream.at(3) for stream in running))
        waiting = [client.start(Ask(seed, 10, 10)) for seed in range(10, 18)]

        async def they_wait() -> bool:
            return await scrape(cluster, "scheduler", "lorrery_scheduler_waiting_requests") == 8

        await wait_until(they_wait)
        await _kill_scheduler(cluster)
        # Until its worker is back all sixteen wait, twice what is allowed to new ones.
        await cluster.restart("scheduler")
        for stream in (*running, *waiting):
            (await stream).check(cluster.settings)
    await nothing_held(cluster)
