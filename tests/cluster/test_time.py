"""Device seconds do not depend on `time_scale`, and weights take their time to load."""

import pytest
from grpc_health.v1 import health_pb2

from lorrery.service.local.cluster import LocalCluster
from lorrery.service.network.channel import open_channel
from lorrery.v1 import types_pb2
from tests.cluster.client import Ask, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster, wait_until

pytestmark = pytest.mark.cluster

ASK = Ask(seed=5, prompt_tokens=200, max_new_tokens=60, adapter_id="lora-0")


async def _device_seconds(cluster: LocalCluster) -> tuple[list[int], dict[str, float]]:
    """Run one request; return its tokens and what each process says it took."""
    async with client_of(cluster) as client:
        stream = await client.start(ASK)
        stream.check(cluster.settings)
        (shard,) = await client.shards()
        assert shard.time_scale == cluster.settings.time_scale
    await nothing_held(cluster)
    return stream.token_ids, {
        "modelled": await scrape(cluster, "worker-0", "lorrery_worker_step_modelled_seconds_sum"),
        "scheduler": await scrape(cluster, "scheduler", "lorrery_scheduler_step_seconds_sum"),
        "gaps": await scrape(cluster, "scheduler", "lorrery_scheduler_gap_seconds_total"),
        "router": await scrape(cluster, "router", "lorrery_router_e2e_request_latency_seconds_sum"),
    }


async def test_time_scale_changes_no_device_second(start_cluster: StartCluster):
    fast = await start_cluster("scheduler.policy=fcfs", "time_scale=0.2")
    fast_token_ids, fast_seconds = await _device_seconds(fast)
    slow = await start_cluster("scheduler.policy=fcfs", "time_scale=1.0")
    slow_token_ids, slow_seconds = await _device_seconds(slow)

    assert fast_token_ids == slow_token_ids
    assert fast_seconds["modelled"] == pytest.approx(slow_seconds["modelled"], rel=1e-9)
    for seconds in (fast_seconds, slow_seconds):
        assert seconds["scheduler"] == pytest.approx(seconds["modelled"], rel=1e-9)
        # What the client waited for: every step, any gap between two, and less than one step back-dated at the start.
        # Were wall seconds reported, the fast cluster would tell a fifth of this.
        assert seconds["router"] > 0.8 * (seconds["modelled"] + seconds["gaps"])


async def test_worker_that_loads_its_weights_is_neither_ready_nor_attached(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", num_workers=0)
    address = f"worker.scheduler={cluster.scheduler_address}"
    await cluster.add("late", "worker", [address, "worker.startup_seconds=3600"])
    worker = cluster.processes["late"]
    async with client_of(cluster) as client, open_channel(worker.grpc, cluster.settings.client_tls) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        streams = [client.start(Ask(seed)) for seed in range(3)]

        async def all_wait() -> bool:
            return await scrape(cluster, "scheduler", "lorrery_scheduler_unplaced_requests") == 3

        await wait_until(all_wait)
        status = (await check(health_pb2.HealthCheckRequest(), timeout=20)).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await scrape(cluster, "late", "lorrery_worker_state", state="loading") == 1
        assert await scrape(cluster, "late", "lorrery_worker_attached") == 0
        (shard,) = await client.shards()
        assert (len(shard.workers), shard.num_unplaced) == (0, 3)

        # One that takes less, and takes its time all the same.
        cluster.kill("late")
        await cluster.ended("late")
        await cluster.add("soon", "worker", [address, "worker.startup_seconds=0.5"])
        for stream in streams:
            usage = (await stream).check(cluster.settings)
            assert usage.queue_seconds > 0.1
        await cluster.serving("soon")
        assert await scrape(cluster, "soon", "lorrery_worker_state", state="attached") == 1

        async def is_shown() -> bool:  # the router asks for its status once a second at most
            states = [worker.state for shard in await client.shards() for worker in shard.workers]
            return states == [types_pb2.WORKER_STATE_READY]

        await wait_until(is_shown)
    await nothing_held(cluster, without=["late"])


async def test_worker_of_another_model_is_never_ready(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", num_workers=0)
    await cluster.add("other", "worker", [f"worker.scheduler={cluster.scheduler_address}", "model=Llama-2-7B"])

    async def refused() -> bool:
        return any("serves 'Llama-2-7B'" in line for line in cluster.processes["other"].tail)

    await wait_until(refused)
    assert await scrape(cluster, "other", "lorrery_worker_attachments_total") == 0
    assert await scrape(cluster, "scheduler", "lorrery_scheduler_workers") == 0
