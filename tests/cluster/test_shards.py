"""Several routers on one scheduler, and several schedulers behind one router."""

import asyncio

import grpc
import pytest

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, Stream, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster, wait_until

pytestmark = pytest.mark.cluster

ADAPTERS = ("", "lora-0", "lora-1", "lora-2", "lora-3", "big", "loaded-later")


def _start(client: Client, count: int, output: int, adapters: tuple[str, ...] = ADAPTERS) -> list[Stream]:
    return [client.start(Ask(seed, 30, output, adapters[seed % len(adapters)])) for seed in range(count)]


async def _start_streams(client: Client, count: int, output: int, adapters: tuple[str, ...] = ADAPTERS) -> list[Stream]:
    """Start streams, and wait until all have begun and none has ended."""
    streams = _start(client, count, output, adapters)
    await asyncio.gather(*(stream.at(5) for stream in streams))
    assert not any(stream.over for stream in streams), [stream.error for stream in streams]
    return streams


async def _check_all(cluster: LocalCluster, streams: list[Stream]) -> set[str]:
    """Wait for the ends; return which workers they were at."""
    await asyncio.gather(*streams)
    return {stream.check(cluster.settings).worker_id for stream in streams}


async def test_killed_router_takes_its_own_requests_with_it_and_no_others(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs")
    await cluster.add("router-1", "router", [f'router.schedulers=["{cluster.scheduler_address}"]'])
    await cluster.serving("router-1")
    async with client_of(cluster) as client, Client(cluster.processes["router-1"].grpc) as other_client:
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_routers") == 2
        streams = await _start_streams(client, 8, 1000, ADAPTERS[:-1])
        others = await _start_streams(other_client, 8, 2000, ADAPTERS[:-1])
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_in_flight_requests") == 16
        cluster.kill("router-1")
        for stream in others:
            await stream
            assert stream.error is not None
            assert stream.error.code() is grpc.StatusCode.UNAVAILABLE

        async def others_are_gone() -> bool:
            return await scrape(cluster, "scheduler", "lorrery_scheduler_orphaned_requests_total") == 8

        await wait_until(others_are_gone)
        await _check_all(cluster, streams)
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_routers") == 1
    await nothing_held(cluster, without=["router-1"])


async def _add_shard(cluster: LocalCluster) -> str:
    """Add a scheduler with a worker, and a router before both shards; return the router's address."""
    await cluster.add("scheduler-1", "scheduler")
    addresses = [cluster.scheduler_address, cluster.processes["scheduler-1"].grpc]
    await cluster.add("shard-1-worker", "worker", [f"worker.scheduler={addresses[1]}"])
    await cluster.add("router-1", "router", [f'router.schedulers=["{addresses[0]}", "{addresses[1]}"]'])
    for name in ("shard-1-worker", "router-1"):
        await cluster.serving(name)

    async def both_connected() -> bool:
        return await scrape(cluster, "router-1", "lorrery_router_shard_connected") == 2

    await wait_until(both_connected)
    return cluster.processes["router-1"].grpc


async def test_killed_shard_hands_its_streams_to_the_other(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs")
    async with Client(await _add_shard(cluster)) as client:
        shards = await client.shards()
        workers = {worker.worker_id for shard in shards for worker in shard.workers}
        assert [len(shard.workers) for shard in shards] == [1, 1]
        await client.load_adapter("loaded-later", 8)
        # Those without adapter spread by their random ids: that all 16 of them meet on one shard is one in 32,768.
        # None may end before all have begun.
        parts = await asyncio.gather(_start_streams(client, 16, 1000, ("",)), _start_streams(client, 14, 1000))
        streams = [stream for part in parts for stream in part]
        in_flight = [
            await scrape(cluster, name, "lorrery_scheduler_in_flight_requests") for name in ("scheduler", "scheduler-1")
        ]
        assert sum(in_flight) == 30
        assert all(in_flight)
        cluster.kill("scheduler-1")
        (survivor,) = [worker.worker_id for worker in shards[0].workers]
        assert await _check_all(cluster, streams) == {survivor}
        assert await scrape(cluster, "router-1", "lorrery_router_resumed_total") == in_flight[1]
        await nothing_held(cluster, without=["scheduler-1"])

        # It comes back, knows what was loaded at run time, and gets its share.
        await cluster.restart("scheduler-1")

        async def all_attached() -> bool:
            return [len(shard.workers) for shard in await client.shards()] == [1, 1]

        await wait_until(all_attached)
        again = _start(client, 16, 20, ("",)) + _start(client, 14, 20)
        assert await _check_all(cluster, again) == workers
        assert (await client.adapters())["loaded-later"] == 8
    await nothing_held(cluster)
