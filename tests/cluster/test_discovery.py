"""Schedulers behind a name, which come and go while streams run: real processes, sockets and DNS answers."""

import asyncio
from collections.abc import Sequence

import pytest

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, Stream
from tests.cluster.gauges import scrape
from tests.cluster.harness import StartCluster, wait_until
from tests.cluster.name_server import NameServer, name_server

pytestmark = pytest.mark.cluster

HOSTS = ("127.0.0.2", "127.0.0.3")


async def _by_name(start_cluster: StartCluster, server: NameServer, workers: Sequence[str]) -> LocalCluster:
    """Start a scheduler that a name has, and by that name workers and a router; one worker more has its address."""
    cluster = await start_cluster("scheduler.policy=fcfs", f"scheduler.listen={HOSTS[0]}:0")
    port = int(cluster.scheduler_address.rpartition(":")[2])
    server.addresses = {"schedulers.test": HOSTS[:1]}
    target = server.target("schedulers.test", port)
    for name in workers:
        own = [f"worker.name={name}", f"worker.scheduler={target}", "worker.resolve_seconds=0.2"]
        await cluster.add(name, "worker", own)
    await cluster.add("by-name", "router", [f'router.schedulers=["{target}"]', "router.resolve_seconds=0.2"])
    for name in (*workers, "by-name"):
        await cluster.serving(name)
    return cluster


async def _add_scheduler(cluster: LocalCluster) -> None:
    """Start another scheduler, which the name does not have yet."""
    port = cluster.scheduler_address.rpartition(":")[2]
    await cluster.add("scheduler-1", "scheduler", [f"scheduler.listen={HOSTS[1]}:{port}"])


async def _workers(cluster: LocalCluster, scheduler: str) -> float:
    return await scrape(cluster, scheduler, "lorrery_scheduler_workers", state="ready")


async def _finish(cluster: LocalCluster, streams: Sequence[Stream]) -> None:
    await asyncio.gather(*streams)
    for stream in streams:
        stream.check(cluster.settings)


async def test_a_scheduler_that_joins_the_name_gets_workers_and_requests(start_cluster: StartCluster) -> None:
    async with name_server() as server:
        cluster = await _by_name(start_cluster, server, ("named-0", "named-1"))
        await _add_scheduler(cluster)
        async with Client(cluster.processes["by-name"].grpc) as client:
            assert await _workers(cluster, "scheduler") == 3
            running = [client.start(Ask(seed, 30, 100)) for seed in range(24)]
            await asyncio.gather(*(stream.at(3) for stream in running))
            server.addresses = {"schedulers.test": HOSTS}

            async def it_has_a_worker() -> bool:
                return await _workers(cluster, "scheduler-1") > 0

            await wait_until(it_has_a_worker)
            await _finish(cluster, running)

            async def it_gets_requests() -> bool:  # once the router has heard of its worker
                await _finish(cluster, [client.start(Ask(seed, 30, 20)) for seed in range(4)])
                return await scrape(cluster, "scheduler-1", "lorrery_scheduler_output_tokens_total") > 0

            await wait_until(it_gets_requests)
            assert await scrape(cluster, "scheduler", "lorrery_scheduler_workers_lost_total") == 0


async def test_a_scheduler_that_leaves_the_name_ends_what_it_has(start_cluster: StartCluster) -> None:
    async with name_server() as server:
        cluster = await _by_name(start_cluster, server, ("named-0",))
        await _add_scheduler(cluster)
        async with Client(cluster.processes["by-name"].grpc) as client:
            running = [client.start(Ask(seed, 30, 100)) for seed in range(8)]
            await asyncio.gather(*(stream.at(3) for stream in running))
            server.addresses = {"schedulers.test": HOSTS[1:]}

            async def the_router_has_left() -> bool:
                return await scrape(cluster, "by-name", "lorrery_router_shard_connected") == 1

            await _finish(cluster, running)
            assert await scrape(cluster, "by-name", "lorrery_router_resumed_total") == 0
            await wait_until(the_router_has_left)
            await _finish(cluster, [client.start(Ask(seed, 30, 20)) for seed in range(8)])
            assert await _workers(cluster, "scheduler-1") == 1

            async def it_has_one_worker() -> bool:  # that which has its address
                return await _workers(cluster, "scheduler") == 1

            await wait_until(it_has_one_worker)


async def test_what_a_scheduler_without_workers_has_goes_on_elsewhere(start_cluster: StartCluster) -> None:
    async with name_server() as server:
        cluster = await _by_name(start_cluster, server, ())
        await _add_scheduler(cluster)
        server.addresses = {"schedulers.test": HOSTS}
        address = cluster.processes["scheduler-1"].grpc
        await cluster.add("other", "worker", ["worker.name=other", f"worker.scheduler={address}"])
        await cluster.serving("other")

        async with Client(cluster.processes["by-name"].grpc) as client:
            running: list[Stream] = []

            async def both_have_requests() -> bool:
                running.append(client.start(Ask(len(running), 30, 1000)))
                name = "lorrery_scheduler_in_flight_requests"
                return all([await scrape(cluster, one, name) for one in ("scheduler", "scheduler-1")])

            await wait_until(both_have_requests)
            await asyncio.gather(*(stream.at(3) for stream in running))
            cluster.kill("other")
            await _finish(cluster, running)
            assert await scrape(cluster, "by-name", "lorrery_router_resumed_total") > 0
