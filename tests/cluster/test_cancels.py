"""A thousand requests that are cancelled at random moments leave nothing behind."""

import asyncio
import random

import grpc
import pytest

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, Stream, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster, wait_until

pytestmark = pytest.mark.cluster

NUM_CANCELS = 1000
AT_ONCE = 64
ADAPTERS = ("", "lora-0", "lora-1", "lora-2", "lora-3", "big")
LONGEST_SECONDS = 0.3


async def test_thousand_cancels_at_random_moments_leave_nothing(start_cluster: StartCluster):
    # Small limits, so that many are cancelled while they wait.
    cluster = await start_cluster(
        "scheduler.policy=fcfs", "scheduler.max_num_seqs=12", "scheduler.max_total_token_num=20000", num_workers=2
    )
    rng = random.Random(20231116)
    async with client_of(cluster) as client:
        asks = iter([_long_ask(rng) for _ in range(NUM_CANCELS)])
        endings = [ending for each in range(AT_ONCE) for ending in [_cancel_one_after_another(client, asks, each)]]
        counts = await asyncio.gather(*endings)
        assert sum(counts) == NUM_CANCELS
        await nothing_held(cluster)
        await _serves(client, cluster)
    await nothing_held(cluster)
    outcomes = {
        outcome: await scrape(cluster, "router", "lorrery_router_requests_total", outcome=outcome)
        for outcome in ("ok", "cancelled", "deadline", "failed", "unavailable")
    }
    assert outcomes["ok"] == 1
    assert outcomes["cancelled"] > 0
    assert outcomes["deadline"] > 0
    assert outcomes["failed"] == outcomes["unavailable"] == 0


def _long_ask(rng: random.Random) -> Ask:
    return Ask(rng.getrandbits(64), rng.randint(1, 1500), 2000, rng.choice(ADAPTERS))


async def _cancel_one_after_another(client: Client, asks, seed: int) -> int:
    """Cancel each request some way or other; return how many."""
    rng = random.Random(seed)
    count = 0
    for ask in asks:
        kind = rng.choice(("at once", "later", "deadline", "after tokens"))
        delay_seconds = rng.uniform(0.001, LONGEST_SECONDS)
        stream = client.start(ask, timeout=delay_seconds if kind == "deadline" else 60.0)
        if kind == "at once":
            stream.cancel()
        elif kind == "later":
            asyncio.get_running_loop().call_later(delay_seconds, stream.cancel)
        elif kind == "after tokens":
            asyncio.get_running_loop().call_later(LONGEST_SECONDS, stream.cancel)
            await stream.at(rng.randint(1, 10))
            stream.cancel()
        await stream
        _check_cut_off(stream, by_deadline=kind == "deadline")
        count += 1
    return count


def _check_cut_off(stream: Stream, *, by_deadline: bool) -> None:
    assert stream.finish is None
    if by_deadline:
        assert stream.error is not None
        assert stream.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, stream.error
    else:
        assert stream.cancelled, stream.error


async def _serves(client: Client, cluster: LocalCluster) -> None:
    (await client.start(Ask(seed=1))).check(cluster.settings)


@pytest.mark.parametrize("strict", ["false", "true"])
async def test_cancelled_request_leaves_from_queue_and_batch(start_cluster: StartCluster, strict: str):
    cluster = await start_cluster(
        "scheduler.policy=req_queue", f"scheduler.strict={strict}", "scheduler.running_max_req_size=1"
    )
    async with client_of(cluster) as client:
        running = client.start(Ask(seed=1, max_new_tokens=2000, adapter_id="lora-0"))
        await running.at(3)
        waiting = client.start(Ask(seed=2, max_new_tokens=2000, adapter_id="lora-1"))
        other = client.start(Ask(seed=3, max_new_tokens=5))

        async def both_wait() -> bool:
            return await scrape(cluster, "scheduler", "lorrery_scheduler_waiting_requests") == 2

        await wait_until(both_wait)
        waiting.cancel()
        await waiting
        running.cancel()
        await running
        (await other).check(cluster.settings)
        await nothing_held(cluster)


async def test_last_cancel_frees_the_worker_which_then_drains_at_once(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", "worker.drain_seconds=120")
    async with client_of(cluster) as client:
        stream = client.start(Ask(seed=1, max_new_tokens=2000, adapter_id="lora-0"))
        await stream.at(3)
        stream.cancel()
        await stream
        await nothing_held(cluster)
        cluster.kill("worker-0", 15)
        assert await cluster.ended("worker-0") == 0
