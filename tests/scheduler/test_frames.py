"""Who watches a scheduler, and what they see: real streams, a worker played by the test."""

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.whole_prompts import Static
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.facts import FaultBegan, Preempted
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.placements.by_load import LeastLoaded
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.subscribers.frames import Tables, snapshot
from lorrery.scheduler.subscribers.history import History
from lorrery.v1 import frame_pb2, scheduler_pb2, types_pb2
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.validation.policy.drive import Device
from lorrery.vocabulary import u32
from tests.cluster.client import error_info
from tests.cluster.harness import PATIENCE_SECONDS, wait_until
from tests.scheduler.core.clusters import cluster
from tests.scheduler.harness import Harness, tokens_of
from tests.scheduler.harness import scheduler as scheduler

FIRST_STEP_PS = 1_000_000_000


class Watch:
    """Reads frames, and keeps the names that they bring."""

    def __init__(self, harness: Harness, hz: float = 20) -> None:
        self.call = harness.stub.WatchFrames(pb.WatchFramesRequest(hz=hz))
        harness.calls.append(self.call)
        self.adapters, self.tenants = ["base"], [None]
        self.events: list[tuple[str, str]] = []
        self.ended: list[frame_pb2.EndedRequest] = []

    async def next(self) -> frame_pb2.Frame:
        message = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
        assert isinstance(message, scheduler_pb2.WatchFramesResponse)
        self.adapters += message.frame.adapters_new
        self.tenants += message.frame.tenants_new
        self.events += [(event.kind, event.text) for event in message.frame.events]
        self.ended += message.frame.ended
        return message.frame

    async def until(self, seen: Callable[[frame_pb2.Frame], bool]) -> frame_pb2.Frame:
        for _ in range(1200):
            frame = await self.next()
            if seen(frame):
                return frame
        raise AssertionError("not seen within 1200 frames")


async def test_a_request_is_seen_from_its_arrival_to_its_end(scheduler: Harness) -> None:
    watch = Watch(scheduler)
    empty = await watch.next()
    assert (list(empty.workers), empty.totals.requests) == ([], 0)
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(7, prompt=10, max_new=3, adapter="a")
    plan = await worker.plan()
    frame = await watch.until(lambda frame: bool(frame.workers and frame.workers[0].requests_u32))
    (seen,) = frame.workers
    assert (seen.worker_id, seen.gpu, seen.pool_tokens, seen.prefills, seen.decodes) == ("w", "test", 6000, True, False)
    assert list(u32.unpack(seen.prompt_tokens_u32)) == [10]
    assert list(u32.unpack(seen.output_tokens_u32)) == [0]
    assert [watch.adapters[number] for number in u32.unpack(seen.request_adapters_u32)] == ["a"]
    assert [watch.tenants[number] for number in u32.unpack(seen.request_tenants_u32)] == [""]
    assert [watch.adapters[number] for number in u32.unpack(seen.adapters_u32)] == ["a"]
    await worker.step(plan)
    plan = await worker.plan()
    await worker.step(plan)
    frame = await watch.until(lambda frame: list(u32.unpack(frame.workers[0].output_tokens_u32)) == [2])
    assert (frame.workers[0].num_tokens, frame.workers[0].step_ps, frame.workers[0].decodes) == (2, FIRST_STEP_PS, True)
    assert (frame.totals.output_tokens, frame.tenants[0].output_tokens, frame.totals.finished) == (2, 2, 0)
    await worker.step(plan)
    tokens, _ = await tokens_of(router, 7)
    assert len(tokens) == 3
    frame = await watch.until(lambda frame: frame.totals.finished == 1)
    (ended,) = watch.ended
    assert (ended.outcome, ended.output_tokens, ended.worker, watch.adapters[ended.adapter]) == ("length", 3, 1, "a")
    phases = ended.queue_ps + ended.adapter_load_ps + ended.prefill_ps + ended.decode_ps
    assert phases == ended.arrived_ps + phases - ended.arrived_ps > 0
    assert (frame.totals.requests, frame.totals.prompt_tokens, frame.totals.output_tokens) == (1, 10, 3)
    assert (frame.workers[0].step_ps, frame.workers[0].requests_u32, frame.workers[0].busy_ps) == (
        0,
        b"",
        3 * FIRST_STEP_PS,
    )
    assert [kind for kind, _ in watch.events] == [
        "worker_joined",
        "load",
        *(["evict"] if len(watch.events) > 2 else []),
    ]


async def test_output_that_a_resumed_request_brings_is_not_counted_as_new(scheduler: Harness) -> None:
    watch = Watch(scheduler)
    await watch.next()
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, prompt=10, max_new=5, produced=[100, 101], resumed=True)
    plan = await worker.plan()
    for num_new in (1, 2, 3):
        await worker.step(plan)
        if num_new == 1:
            plan = await worker.plan()
        frame = await watch.until(lambda frame, new=num_new: frame.totals.output_tokens == new)
        assert [tenant.output_tokens for tenant in frame.tenants] == [num_new]
    frame = await watch.until(lambda frame: frame.totals.finished == 1)
    assert (frame.totals.output_tokens, frame.tenants[0].output_tokens) == (3, 3)
    assert [one.output_tokens for one in watch.ended] == [5]


@pytest.mark.parametrize(
    ("num_frequent", "num_rare", "told", "num_more"),
    [(10, 5, (10, 5), 0), (60, 0, (50, 0), 10), (60, 5, (45, 5), 15), (0, 60, (0, 50), 10), (60, 60, (0, 50), 70)],
)
def test_a_frame_has_the_latest_fifty_events_and_frequent_ones_only_beside_the_rare(
    num_frequent: int, num_rare: int, told: tuple[int, int], num_more: int
) -> None:
    kept = History()
    seen = kept.begin()
    for number in range(60):
        if number < num_frequent:
            kept.handlers[Preempted](Preempted(Sequence(number, 1, 1)), number, None)
        if number < num_rare:
            kept.handlers[FaultBegan](FaultBegan(f"fault {number}"), number, None)
    events, more = kept.take_events(seen)
    frequent, rare = ([one for one in events if one.kind == kind] for kind in ("preempt", "fault"))
    assert ((len(frequent), len(rare)), more) == (told, num_more)
    assert events == sorted(events, key=lambda event: event.number)
    assert [one.at_ps for one in frequent] == list(range(num_frequent - told[0], num_frequent))
    assert [one.at_ps for one in rare] == list(range(num_rare - told[1], num_rare))
    assert kept.take_events(seen) == ([], 0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_of_those_that_wait_the_longest_wait_is_shown(num_workers: int) -> None:
    core = cluster(*[200] * num_workers)
    for handle, arrived_ps in ((1, 10), (2, 40), (3, 70)):  # no worker has decided yet
        core.submit(Sequence(handle, 5, 5, arrived_ps, tenant_id="t"), arrived_ps)
    shown = snapshot(core, Tables(), 100)
    (tenant,), (adapter,) = shown.tenants.values(), shown.adapters.values()
    assert (tenant.num_waiting, tenant.oldest_ps) == (adapter.num_waiting, adapter.oldest_ps) == (3, 90)
    assert [(worker.num_waiting, worker.oldest_ps) for worker in shown.workers] == [(3, 90)] * num_workers


def test_a_resumed_request_shows_all_its_output_also_while_it_is_held() -> None:
    core = ClusterCore(LeastLoaded())
    memory = PeakMemory(200, exact=True, together=True)
    core.attach(Member("w", Replica(Fifo(), Static(BatchLimits(4, 100)), memory), 200), 0)
    core.submit(Sequence(1, 5, 20, produced_tokens=3), 0, resumed=True)
    core.submit(Sequence(2, 5, 20), 0)
    (member,), device, at_ps = core.members.values(), Device({1: 5, 2: 7}), 0
    assert [snapshot(core, Tables(), 0).workers[0].num_waiting, member.replica.num_waiting] == [2, 2]
    shown: list[list[int]] = []
    while isinstance(plan := member.plan(at_ps), Plan):
        shown.append(snapshot(core, Tables(), at_ps).workers[0].output_tokens)
        ran = device.run(plan, at_ps, 1, None)
        member.commit(plan, ran)
        at_ps = ran.end_ps
    # The first ends with its second token here, and keeps its place until the other's seventh.
    assert shown == [[3, 0], [4, 1], [5, 2], [5, 3], [5, 4], [5, 5], [5, 6]]


async def test_a_worker_that_leaves_after_it_has_drained_is_not_lost(scheduler: Harness) -> None:
    watch = Watch(scheduler)
    await watch.next()
    worker = await scheduler.attach()
    await worker.call.write(pb.AttachRequest(draining=pb.WorkerDraining()))
    await watch.until(lambda _: ("worker_draining", "w") in watch.events)
    worker.call.cancel()
    frame = await watch.until(lambda _: ("worker_lost", "w left, 0 requests queued again") in watch.events)
    assert (list(frame.workers), frame.totals.workers_lost) == ([], 0)


async def test_requests_that_wait_for_a_slot_of_their_key_wait(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    for handle in (1, 2, 3):
        submit = pb.Submit(
            handle=handle,
            request_id=f"request-{handle}",
            prompt_token_ids_u32=u32.pack(range(10)),
            sampling=pb.Sampling(seed=1, max_new_tokens=4),
            quota=pb.Quota(key="k", max_running=1),
        )
        await router.call.write(pb.RouteRequest(submit=submit))
    await worker.plan()
    await wait_until(lambda: scheduler.value("held_requests") == 2)
    gauges = ("waiting_requests", "unplaced_requests", "running_requests", "in_flight_requests")
    assert [scheduler.value(name) for name in gauges] == [2, 0, 1, 3]


async def test_a_watch_that_begins_later_has_the_counts_and_the_recent_events(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, max_new=1, adapter="a")
    await worker.step(await worker.plan())
    await Watch(scheduler).until(lambda frame: frame.totals.finished == 1)
    watch = Watch(scheduler)
    frame = await watch.next()
    assert (frame.totals.finished, frame.totals.loads, list(frame.ended)) == (1, 1, [])
    assert [kind for kind, _ in watch.events] == ["worker_joined", "load"]


async def test_a_lost_worker_is_missing_until_one_of_its_name_or_of_its_pool_attaches(scheduler: Harness) -> None:
    for back in ("w", "other"):
        worker = await scheduler.attach()
        watch = Watch(scheduler)
        assert not (await watch.until(lambda frame: len(frame.workers) == 1)).missing
        worker.call.cancel()
        (missing,) = (await watch.until(lambda frame: not frame.workers)).missing
        assert (missing.worker_id, missing.gpu, missing.pool_tokens) == ("w", "test", 6000)
        assert missing.lost_ps > 0
        assert [one.worker_id for one in (await Watch(scheduler).next()).missing] == ["w"]
        replacing = await scheduler.attach(back)
        assert not (await watch.until(lambda frame: len(frame.workers) == 1)).missing
        await replacing.call.write(pb.AttachRequest(draining=pb.WorkerDraining()))
        await watch.until(lambda frame: frame.workers[0].draining)
        replacing.call.cancel()
        assert not (await watch.until(lambda frame: not frame.workers)).missing


async def test_faults_that_are_on_are_in_the_frames(scheduler: Harness) -> None:
    watch = Watch(scheduler)
    rules = ["slow_worker,worker=w,factor=4", "slow_adapter_load,at=1000,factor=2"]
    await scheduler.stub.SetClusterFaults(pb.SetClusterFaultsRequest(rules=rules))
    frame = await watch.until(lambda frame: bool(frame.faults))
    assert [(fault.rule, fault.num_met) for fault in frame.faults] == [(rules[0], 0)]
    await scheduler.stub.SetClusterFaults(pb.SetClusterFaultsRequest())
    await watch.until(lambda frame: not frame.faults)


async def test_who_waits_who_is_refused_and_who_is_lost_is_seen(scheduler: Harness) -> None:
    watch = Watch(scheduler)
    await watch.next()
    router = await scheduler.route()
    await router.submit(1, adapter="a")
    frame = await watch.until(lambda frame: frame.num_unplaced == 1)
    assert [(watch.adapters[row.adapter], row.num_waiting) for row in frame.adapters] == [("a", 1)]
    assert frame.tenants[0].oldest_ps > 0
    await router.submit(2, adapter="</script>")
    frame = await watch.until(lambda frame: frame.totals.refused == 1)
    assert watch.events[-1][0] == "refused"
    assert "</script>" in watch.events[-1][1]
    worker = await scheduler.attach()
    await worker.step(await worker.plan())
    await watch.until(lambda frame: bool(frame.workers))
    worker.call.cancel()
    frame = await watch.until(lambda frame: frame.totals.workers_lost == 1)
    assert (list(frame.workers), frame.num_unplaced, frame.totals.output_tokens) == ([], 1, 1)
    assert ("worker_lost", "w lost, 1 requests queued again") in watch.events
    await router.cancel(1)
    frame = await watch.until(lambda frame: frame.totals.cancelled == 1)
    assert [(one.outcome, one.worker, one.output_tokens) for one in watch.ended] == [("cancelled", 0, 1)]
    assert frame.totals.output_tokens == 1


@pytest.mark.parametrize("hz", [0.5, 21, -1, float("nan"), float("inf")])
async def test_a_rate_out_of_range_is_refused(scheduler: Harness, hz: float) -> None:
    call = scheduler.stub.WatchFrames(pb.WatchFramesRequest(hz=hz))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(caught.value)[1]["field"] == "hz"


async def test_a_watcher_that_stops_reading_holds_up_nobody(scheduler: Harness) -> None:
    stuck = Watch(scheduler)
    stuck.adapters = [types_pb2.WorkerState.Name(1)]
    router = await scheduler.route()
    for handle in range(1, 400):  # frames grow
        await router.submit(handle, adapter="</script>" * 50 + str(handle))
    brisk = Watch(scheduler)
    for _ in range(20):
        await brisk.next()


async def test_an_adapter_that_is_unloaded_is_marked_and_its_counts_are_forgotten(scheduler: Harness) -> None:
    async def load() -> None:
        await scheduler.stub.RegisterAdapter(
            pb.RegisterAdapterRequest(adapter=types_pb2.Adapter(adapter_id="new", rank=4))
        )

    await load()
    watch = Watch(scheduler)
    await watch.next()
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, max_new=2_000, adapter="new")
    await worker.step(await worker.plan())

    async def row_of_new(seen: Callable[[frame_pb2.AdapterFrame], bool]) -> frame_pb2.AdapterFrame:
        rows: list[frame_pb2.AdapterFrame] = []

        def found(frame: frame_pb2.Frame) -> bool:
            rows[:] = [row for row in frame.adapters if watch.adapters[row.adapter] == "new"]
            return bool(rows) and seen(rows[0])

        await watch.until(found)
        return rows[0]

    row = await row_of_new(lambda row: row.num_running == 1)
    assert (row.num_loads, row.unloaded) == (1, False)
    await scheduler.stub.UnregisterAdapter(pb.UnregisterAdapterRequest(adapter_id="new"))
    row = await row_of_new(lambda row: row.unloaded)
    assert (row.num_loads, row.num_running) == (0, 1)  # its request goes on
    late = Watch(scheduler)
    frame = await late.next()
    assert [(late.adapters[row.adapter], row.unloaded) for row in frame.adapters] == [("new", True)]
    loading = asyncio.create_task(load())
    while not loading.done():  # it returns when the worker has the adapter, some steps later
        await worker.step(await worker.plan(), hand_back=True)
    assert (await row_of_new(lambda row: not row.unloaded)).num_running == 1
