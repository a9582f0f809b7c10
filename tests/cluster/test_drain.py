"""SIGTERM drains a service: nothing new, what runs is finished, exit code 0."""

import asyncio
import re
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2

from lorrery.service.local.cluster import LocalCluster
from lorrery.v1 import types_pb2
from tests.cluster.client import Ask, Client, Stream, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster, wait_until

pytestmark = pytest.mark.cluster

EXIT_SECONDS = 60.0
LONG_DRAIN = ("scheduler.drain_seconds=60", "worker.drain_seconds=60", "router.drain_seconds=60")


async def _exit_code(cluster: LocalCluster, name: str) -> int:
    async with asyncio.timeout(EXIT_SECONDS):
        return await cluster.ended(name)


async def _health(client: Client) -> int:
    check = client.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return (await check(health_pb2.HealthCheckRequest(service="lorrery.v1.RouterService"), timeout=20)).status


async def _start_streams(client: Client, count: int, output: int = 450) -> list[Stream]:
    """Start streams, and wait until all have begun; none has ended, nor will for seconds."""
    streams = [client.start(Ask(seed, 20, output, "lora-0" if seed % 2 else "")) for seed in range(count)]
    await asyncio.gather(*(stream.at(5) for stream in streams))
    assert not any(stream.over for stream in streams)
    return streams


async def _finish(cluster: LocalCluster, streams: list[Stream]) -> list[types_pb2.Usage]:
    await asyncio.gather(*streams)
    return [stream.check(cluster.settings) for stream in streams]


async def test_draining_router_refuses_new_calls_and_finishes_running_ones(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", *LONG_DRAIN)
    async with client_of(cluster) as client:
        streams = await _start_streams(client, 8)
        assert await _health(client) == health_pb2.HealthCheckResponse.SERVING
        cluster.kill("router", signal.SIGTERM)

        async def not_serving() -> bool:
            return await _health(client) == health_pb2.HealthCheckResponse.NOT_SERVING

        await wait_until(not_serving)
        code, message = await client.failure(Ask(seed=99))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "draining" in message
        assert not any(stream.over for stream in streams)
        await _finish(cluster, streams)
        assert await _exit_code(cluster, "router") == 0
    await nothing_held(cluster, without=["router"])


async def test_router_that_may_not_drain_long_cancels_what_is_left(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", "router.drain_seconds=0.3")
    async with client_of(cluster) as client:
        streams = await _start_streams(client, 8, output=2000)
        cluster.kill("router", signal.SIGTERM)
        assert await _exit_code(cluster, "router") == 0
        for stream in streams:
            await stream
            assert stream.finish is None
            assert stream.error is not None
            assert stream.error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await nothing_held(cluster, without=["router"])


async def test_draining_worker_is_shown_so_finishes_what_runs_and_leaves(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", *LONG_DRAIN, num_workers=2)
    async with client_of(cluster) as client:
        streams = await _start_streams(client, 16)
        cluster.kill("worker-0", signal.SIGTERM)

        async def states() -> list[int]:
            return sorted(worker.state for shard in await client.shards() for worker in shard.workers)

        async def one_drains() -> bool:
            return await states() == [types_pb2.WORKER_STATE_READY, types_pb2.WORKER_STATE_DRAINING]

        await wait_until(one_drains)
        assert await scrape(cluster, "worker-0", "lorrery_worker_state", state="draining") == 1
        (draining,) = [
            worker.worker_id
            for shard in await client.shards()
            for worker in shard.workers
            if worker.state == types_pb2.WORKER_STATE_DRAINING
        ]
        later = [client.start(Ask(seed, 20, 20)) for seed in range(4)]
        assert draining not in {usage.worker_id for usage in await _finish(cluster, later)}
        usages = await _finish(cluster, streams)
        assert draining in {usage.worker_id for usage in usages}
        assert {usage.num_requeues for usage in usages} == {0}
        assert await _exit_code(cluster, "worker-0") == 0

        async def it_has_left() -> bool:
            return await states() == [types_pb2.WORKER_STATE_READY]

        await wait_until(it_has_left)
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_workers_lost_total") == 0
    await nothing_held(cluster, without=["worker-0"])


async def test_worker_that_may_not_drain_long_gives_back_what_is_left(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", "worker.drain_seconds=0.3", num_workers=2)
    async with client_of(cluster) as client:
        streams = await _start_streams(client, 16)
        cluster.kill("worker-0", signal.SIGTERM)
        assert await _exit_code(cluster, "worker-0") == 0
        usages = await _finish(cluster, streams)
        assert {usage.num_requeues for usage in usages} == {0, 1}
    await nothing_held(cluster, without=["worker-0"])


async def test_draining_scheduler_finishes_what_it_has_and_new_requests_wait_for_the_next(
    start_cluster: StartCluster, capsys: pytest.CaptureFixture[str]
):
    limits = ("scheduler.max_num_seqs=6", "scheduler.policy=fcfs")
    cluster = await start_cluster(*limits, *LONG_DRAIN)
    async with client_of(cluster) as client:
        streams = [client.start(Ask(seed, 20, 600)) for seed in range(8)]  # two of them wait
        await asyncio.gather(*(stream.at(5) for stream in streams[:6]))
        cluster.kill("scheduler", signal.SIGTERM)

        async def draining() -> bool:
            return await scrape(cluster, "scheduler", "lorrery_service_state", state="draining") == 1

        await wait_until(draining)
        later = [client.start(Ask(seed, 20, 10)) for seed in range(20, 24)]

        async def they_wait() -> bool:
            return await scrape(cluster, "router", "lorrery_router_waiting_for_shard_requests") == 4

        await wait_until(they_wait)
        assert {usage.num_requeues for usage in await _finish(cluster, streams)} == {0}
        assert await _exit_code(cluster, "scheduler") == 0
        assert not any(stream.over for stream in later)
        await cluster.restart("scheduler")
        await _finish(cluster, later)
    await nothing_held(cluster)
    assert {"worker_left", "worker_lost"} & set(re.findall(r"worker_\w+", capsys.readouterr().out)) == {"worker_left"}


async def test_scheduler_that_may_not_drain_long_leaves_the_rest_to_the_next(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", "scheduler.drain_seconds=0.3")
    async with client_of(cluster) as client:
        streams = await _start_streams(client, 8)
        cluster.kill("scheduler", signal.SIGTERM)
        assert await _exit_code(cluster, "scheduler") == 0
        await cluster.restart("scheduler")
        await _finish(cluster, streams)
    await nothing_held(cluster)


async def test_what_services_print_as_json_is_their_log_and_nothing_of_grpcs(
    start_cluster: StartCluster, capsys: pytest.CaptureFixture[str]
):
    cluster = await start_cluster("scheduler.policy=fcfs", "scheduler.drain_seconds=0.3", "log.format=json")
    async with client_of(cluster) as client:
        streams = await _start_streams(client, 8)
        # The scheduler cannot end its call to a worker that is stopped, and cuts the connection: gRPC remarks on that.
        cluster.kill("worker-0", signal.SIGSTOP)
        cluster.kill("scheduler", signal.SIGTERM)
        assert await _exit_code(cluster, "scheduler") == 0
        cluster.kill("worker-0", signal.SIGCONT)
        await cluster.restart("scheduler")
        await _finish(cluster, streams)
    await nothing_held(cluster)
    lines = [line.partition(" | ")[2] for line in capsys.readouterr().out.splitlines()]
    assert len(lines) > 10
    assert not [line for line in lines if not line.startswith("{")]
