"""A scheduler that stood still reads what waits in its sockets before it judges anyone."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from tests.scheduler.harness import OVERRIDES, Harness, tokens_of

TIMEOUTS = ("scheduler.worker_timeout_seconds=1", "scheduler.worker_wait_seconds=1")
"""Shorter than a stop, and long enough for what comes after one, though the stop counts for a part."""
STOP_SECONDS = 1.5


@pytest.fixture
async def scheduler() -> AsyncIterator[Harness]:
    async with Harness(load(None, [*OVERRIDES, *TIMEOUTS])) as harness:
        harness.service._cluster.uptime.now()  # as after the first hello
        yield harness


def stop() -> None:
    """Hold the loop, as SIGSTOP would."""
    time.sleep(STOP_SECONDS)


async def test_a_worker_that_beat_all_the_while_is_not_lost(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, max_new=2)
    plan = await worker.plan()
    # On its way when everything stops: longer ago than the timeout by the time that it is read.
    await worker.call.write(pb.AttachRequest(heartbeat=pb.Heartbeat()))
    stop()
    await worker.step(plan)
    await worker.step(await worker.plan())
    assert (await tokens_of(router, 1))[0] == [100, 101]
    assert scheduler.value("workers_lost_total") == 0


async def test_a_worker_that_is_silent_after_a_stop_is_lost_all_the_same(scheduler: Harness) -> None:
    await scheduler.attach()
    stop()
    assert scheduler.value("workers", state="ready") == 1
    async with asyncio.timeout(60):
        while scheduler.value("workers", state="ready"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert scheduler.value("workers_given_up_total", reason="silent") == 1


async def test_a_request_does_not_give_up_before_the_hello_of_a_worker_is_read(scheduler: Harness) -> None:
    router = await scheduler.route()
    await router.submit(1, max_new=1)  # waits for worker_wait_seconds
    await router.submit(2, adapter="unknown")
    assert (await router.read()).refused.handle == 2
    stop()
    worker = await scheduler.attach()
    await worker.step(await worker.plan())
    assert (await tokens_of(router, 1))[0] == [100]


async def test_a_request_gives_up_after_a_stop_if_no_worker_comes(scheduler: Harness) -> None:
    router = await scheduler.route()
    await router.submit(1, max_new=1)
    await router.submit(2, adapter="unknown")
    assert (await router.read()).refused.handle == 2
    stop()
    refused = (await router.read()).refused
    assert (refused.handle, refused.reason) == (1, pb.REFUSAL_REASON_NO_WORKER)
