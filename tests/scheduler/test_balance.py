"""What waits moves between workers of a scheduler on a real socket; the test plays router and workers."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from tests.cluster.harness import PATIENCE_SECONDS
from tests.scheduler.harness import OVERRIDES, Harness


@pytest.fixture
async def scheduler() -> AsyncIterator[Harness]:
    overrides = (
        *OVERRIDES,
        "scheduler.max_num_seqs=2",
        "scheduler.max_waiting_requests=100",
    )
    async with Harness(load(None, overrides)) as harness:
        yield harness


async def test_a_worker_that_attaches_second_after_a_restart_gets_what_waits(scheduler: Harness) -> None:
    router = await scheduler.route()
    for handle in range(1, 13):
        await router.submit(handle, resumed=True)
    await scheduler.until("unplaced_requests", 12)
    first = await scheduler.attach("w0")
    plan = await first.plan()
    assert [join.handle for join in plan.joins] == [1, 2]
    second = await scheduler.attach("w1")
    await first.step(plan)
    while not second.lengths:
        await first.step(await first.plan(), hand_back=True)
        if scheduler.value("moved_requests_total"):
            assert [join.handle for join in (await second.plan()).joins] == [3, 4]
    core = scheduler.service._cluster.core
    assert {name: len(member.sequences) for name, member in core.members.items()} == {"w0": 6, "w1": 6}


async def test_the_sequences_of_the_only_worker_large_enough_wait_for_another(scheduler: Harness) -> None:
    router = await scheduler.route()
    await scheduler.attach("small", pool=100)
    large = await scheduler.attach("large", pool=6000)
    await router.submit(1, prompt=150)
    assert [join.handle for join in (await large.plan()).joins] == [1]
    large.call.cancel()
    await scheduler.until("unplaced_requests", 1)
    other = await scheduler.attach("other", pool=6000)
    plan = await other.plan()
    assert [join.handle for join in plan.joins] == [1]
    await other.step(plan)
    assert isinstance(await router.read(), pb.RouteResponse)


async def test_what_comes_back_to_the_worker_that_gave_it_up_makes_no_second_plan_beside_the_one_that_runs(
    scheduler: Harness,
) -> None:
    router = await scheduler.route()
    for handle in range(1, 5):
        await router.submit(handle, max_new=10)
    await scheduler.until("unplaced_requests", 4)
    first = await scheduler.attach("w0")
    plan = await first.plan()
    assert [join.handle for join in plan.joins] == [1, 2]
    await first.step(plan)
    plan = await first.plan()  # 3 and 4 cannot start
    second = await scheduler.attach("w1")
    message = await asyncio.wait_for(first.call.read(), PATIENCE_SECONDS)
    assert message.interrupt.plan_id == plan.plan_id  # 3 and 4 are recalled, for w1
    second.call.cancel()
    await scheduler.until("workers_lost_total", 1)
    await first.step(plan, hand_back=True)
    plan = await first.plan()
    assert plan.until_ps  # when they were recalled
    await first.step(plan, hand_back=True)  # now they leave w0, and no other worker is left
    plan = await first.plan()
    message = await asyncio.wait_for(first.call.read(), PATIENCE_SECONDS)
    assert message.WhichOneof("message") == "interrupt"
    assert message.interrupt.plan_id == plan.plan_id
