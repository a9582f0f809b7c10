"""Who watches a scheduler, and what they see: real streams, a worker played by the test."""

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from lorrery.v1 import frame_pb2, scheduler_pb2, types_pb2
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32
from tests.cluster.client import error_info
from tests.cluster.harness import PATIENCE_SECONDS, wait_until
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


def history(harness: Harness):
    return harness.service._cluster.feed._history


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


async def test_nothing_is_kept_while_nobody_watches(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    assert history(scheduler) is None
    one, other = Watch(scheduler), Watch(scheduler)
    await one.next()
    await other.next()
    one.call.cancel()
    await router.submit(1, max_new=1, adapter="a")
    await worker.step(await worker.plan())
    assert (await other.until(lambda frame: frame.totals.finished == 1)).totals.loads == 1
    other.call.cancel()
    await wait_until(lambda: history(scheduler) is None)


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
