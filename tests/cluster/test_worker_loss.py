"""A worker dies or hangs mid-stream: every stream goes on elsewhere, no token lost or repeated."""

import asyncio
import random
import signal
from dataclasses import replace

import pytest

from lorrery.service.local.cluster import LocalCluster
from lorrery.service.settings.cluster import Settings
from tests.cluster.client import Ask, Client, Stream, client_of, text_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster, wait_until

pytestmark = pytest.mark.cluster

NUM_STREAMS = 32
ADAPTERS = ("", "lora-0", "lora-1", "lora-2", "lora-3", "big")
# A worker that is merely starved of CPU must not be taken for a hung one, but where a test is about just that.
SETTINGS = ("scheduler.policy=fcfs", "scheduler.worker_timeout_seconds=60", "worker.heartbeat_seconds=0.1")


def _start_streams(client: Client, seed: int, count: int = NUM_STREAMS, output: int = 350) -> list[Stream]:
    """Start streams; by default none ends while this process or a scrape waits for a core."""
    rng = random.Random(seed)
    asks = [
        Ask(rng.getrandbits(64), rng.randint(1, 200), rng.randint(output, 2 * output), adapter)
        for adapter in rng.choices(ADAPTERS, k=count)
    ]
    for number in range(0, count, 4):  # some say what their output is
        asks[number] = replace(asks[number], output=text_of(asks[number].expected(Settings())[0][:-1]))
    return [client.start(ask) for ask in asks]


async def _all_at(streams: list[Stream], num_tokens: int) -> None:
    await asyncio.gather(*(stream.at(num_tokens) for stream in streams))
    assert not any(stream.over for stream in streams), [stream.error for stream in streams]


async def _check_all(cluster: LocalCluster, streams: list[Stream]) -> list[int]:
    """Wait for the ends; return how often each was queued again."""
    await asyncio.gather(*streams)
    return [stream.check(cluster.settings).num_requeues for stream in streams]


async def _workers_are(cluster: LocalCluster, count: int) -> None:
    async def so() -> bool:
        return await scrape(cluster, "scheduler", "lorrery_scheduler_workers") == count

    await wait_until(so, what=f"{count} workers attached")


async def _running_on_each(cluster: LocalCluster) -> set[float]:
    return {
        await scrape(cluster, process, "lorrery_worker_running_sequences", worker=name)
        for process, names in cluster.worker_processes.items()
        for name in names
    }


async def test_killed_worker_loses_and_repeats_no_token(start_cluster: StartCluster):
    # Each process hosts two GPUs; one that is killed takes both along.
    cluster = await start_cluster(*SETTINGS, "worker.gpus=2", num_workers=2)
    assert cluster.worker_names == ["worker-0.0", "worker-0.1", "worker-1.0", "worker-1.1"]
    async with client_of(cluster) as client:
        streams = _start_streams(client, 1)
        await _all_at(streams, 5)
        assert 0 not in await _running_on_each(cluster)
        cluster.kill("worker-0")
        requeues = await _check_all(cluster, streams)
        assert 0 < sum(requeues) < NUM_STREAMS
        assert max(requeues) == 1
        await nothing_held(cluster, without=["worker-0"])
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_workers_lost_total") == 2

        # A new one takes its place, and its share.
        await cluster.restart("worker-0")
        await _workers_are(cluster, 4)
        again = _start_streams(client, 2, output=20)
        assert not any(await _check_all(cluster, again))
        assert {stream.finish.usage.worker_id for stream in again if stream.finish} == set(cluster.worker_names)
    await nothing_held(cluster)


async def test_all_workers_killed_one_after_another(start_cluster: StartCluster):
    cluster = await start_cluster(*SETTINGS)
    async with client_of(cluster) as client:
        streams = _start_streams(client, 3, count=8)
        for num_tokens in (5, 20):
            await _all_at(streams, num_tokens)
            cluster.kill("worker-0")
            await _workers_are(cluster, 0)
            assert await scrape(cluster, "scheduler", "lorrery_scheduler_unplaced_requests") == 8
            await cluster.restart("worker-0")
        assert set(await _check_all(cluster, streams)) == {2}
    await nothing_held(cluster)


async def test_hung_worker_is_given_up_and_comes_back(start_cluster: StartCluster):
    cluster = await start_cluster(*SETTINGS, "scheduler.worker_timeout_seconds=4", num_workers=2)
    async with client_of(cluster) as client:
        streams = _start_streams(client, 4, output=800)
        await _all_at(streams, 5)
        assert 0 not in await _running_on_each(cluster)
        cluster.kill("worker-0", signal.SIGSTOP)
        await _workers_are(cluster, 1)
        await _all_at(streams, 20)
        # It wakes up while its streams run elsewhere; what it says about them now is dropped.
        cluster.kill("worker-0", signal.SIGCONT)
        await _workers_are(cluster, 2)
        requeues = await _check_all(cluster, streams)
        assert 0 < sum(requeues) < NUM_STREAMS
        again = _start_streams(client, 5, output=20)
        await _check_all(cluster, again)
        assert len({stream.finish.usage.worker_id for stream in again if stream.finish}) == 2
        await nothing_held(cluster)
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_workers_lost_total") == 1
        assert await scrape(cluster, "worker-0", "lorrery_worker_attachments_total") == 2


async def test_short_stop_is_a_gap_and_no_loss(start_cluster: StartCluster):
    cluster = await start_cluster(*SETTINGS, num_workers=2)
    async with client_of(cluster) as client:
        streams = _start_streams(client, 6, count=8)
        await _all_at(streams, 5)
        lengths = [len(stream.token_ids) for stream in streams]
        cluster.kill("worker-0", signal.SIGSTOP)
        # The other worker's streams are the clock: they go on for 20 steps.
        await wait_until(
            lambda: any(len(stream.token_ids) > before + 20 for stream, before in zip(streams, lengths, strict=True))
        )
        cluster.kill("worker-0", signal.SIGCONT)
        assert set(await _check_all(cluster, streams)) == {0}
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_workers_lost_total") == 0
        assert await scrape(cluster, "worker-0", "lorrery_worker_gaps_total") >= 1
    await nothing_held(cluster)
