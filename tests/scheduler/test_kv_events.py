"""Who follows the prefix caches of a scheduler's workers, and when: real streams, a worker played by the test."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.subscribers.kv_events import KvEvents, Watcher
from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import types_pb2
from lorrery.vocabulary import u32
from tests.cluster.harness import PATIENCE_SECONDS, wait_until
from tests.scheduler.harness import OVERRIDES, Harness, Worker, tokens_of

PROMPT = list(range(40))  # two blocks of 16


@pytest.fixture
async def scheduler() -> AsyncIterator[Harness]:
    async with Harness(load(None, (*OVERRIDES, "scheduler.prefix_cache.kind='blocks'"))) as harness:
        yield harness


def watch(scheduler: Harness, worker_id: str = "") -> grpc.aio.UnaryStreamCall:
    call = scheduler.stub.WatchKvEvents(pb.WatchKvEventsRequest(worker_id=worker_id))
    scheduler.calls.append(call)
    return call


async def read(call: grpc.aio.UnaryStreamCall) -> tuple[str, list[tuple[str, int]]]:
    """Whose events came, and of which kind with how many blocks."""
    message = await asyncio.wait_for(call.read(), PATIENCE_SECONDS)
    events = []
    for event in message.events.events:
        kind = event.WhichOneof("event")
        hashes = [] if kind == "cleared" else getattr(event, kind).block_hashes
        events.append((kind, len(hashes)))
    return message.worker_id, events


async def serve(scheduler: Harness, worker: Worker, handle: int, adapter: str = "") -> None:
    """Let the worker run a request of 40 prompt tokens and 2 of output."""
    router = await scheduler.route()
    await router.submit(handle, prompt=len(PROMPT), max_new=2, adapter=adapter)
    await worker.step(await worker.plan())
    await worker.step(await worker.plan())
    await tokens_of(router, handle)


async def test_a_watcher_gets_what_is_there_and_then_what_changes(scheduler: Harness) -> None:
    worker = await scheduler.attach()
    await serve(scheduler, worker, 1)
    call = watch(scheduler)
    assert await read(call) == ("w", [("cleared", 0), ("stored", 2)])
    await serve(scheduler, worker, 2, adapter="a")
    assert await read(call) == ("w", [("stored", 2)])
    late = watch(scheduler, "w")
    assert await read(late) == ("w", [("cleared", 0), ("stored", 2), ("stored", 2)])


async def test_stored_blocks_have_their_tokens_and_their_adapter(scheduler: Harness) -> None:
    worker = await scheduler.attach()
    await serve(scheduler, worker, 1, adapter="a")
    message = await asyncio.wait_for(watch(scheduler).read(), PATIENCE_SECONDS)
    assert message.events.block_size == 16
    stored = message.events.events[1].stored
    assert u32.unpack(stored.token_ids_u32).tolist() == PROMPT[:32]
    assert stored.adapter.adapter_id == "a"
    assert not stored.HasField("parent_block_hash")


async def test_workers_that_come_and_go_have_empty_caches(scheduler: Harness) -> None:
    everybody, other = watch(scheduler), watch(scheduler, "other")
    await everybody.initial_metadata()
    await other.initial_metadata()
    worker = await scheduler.attach()
    assert await read(everybody) == ("w", [("cleared", 0)])
    assert await read(other) == ("other", [("cleared", 0)])
    await serve(scheduler, worker, 1)
    assert await read(everybody) == ("w", [("stored", 2)])
    worker.call.cancel()
    assert await read(everybody) == ("w", [("cleared", 0)])
    await scheduler.attach("other")
    assert await read(everybody) == ("other", [("cleared", 0)])
    assert await read(other) == ("other", [("cleared", 0)])


async def test_nothing_is_noted_once_the_last_watcher_has_gone(scheduler: Harness) -> None:
    await scheduler.attach()
    cache = scheduler.service._cluster.workers["w"].replica.prefix_cache
    calls = [watch(scheduler), watch(scheduler)]
    for call in calls:
        await read(call)
    for call, noted in zip(calls, (True, False), strict=True):
        call.cancel()
        await wait_until(lambda num=int(noted): len(scheduler.service._cluster.kv_events._watchers) == num)
        assert (cache._notes is not None) == noted


async def _read_to_the_end(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_watcher_that_does_not_read_is_cut_off() -> None:
    overrides = (*OVERRIDES, "scheduler.prefix_cache.kind='blocks'", "scheduler.max_pending_router_tokens=1")
    async with Harness(load(None, overrides)) as scheduler:
        await scheduler.attach()
        call = watch(scheduler)
        await read(call)
        (watcher,) = scheduler.service._cluster.kv_events._watchers
        for _ in range(3):  # in one go: nothing is written in between
            watcher.send("w", pb.KvEvents(events=[pb.KvEvent(cleared=pb.AllBlocksCleared())]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(_read_to_the_end(call), PATIENCE_SECONDS)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_pending_router_tokens" in caught.value.details()


async def test_without_blocks_nobody_can_watch_or_publish() -> None:
    async with Harness(load(None, OVERRIDES)) as scheduler:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(scheduler).read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        (detail,) = rpc_status.from_call(caught.value).details
        info = error_details_pb2.ErrorInfo.FromString(detail.value)
        assert (info.reason, info.metadata["value"]) == ("NO_KV_EVENTS", "none")

        attach = scheduler.stub.Attach()
        source = types_pb2.KvEventSource(endpoint="tcp://127.0.0.1:5557")
        await attach.write(
            pb.AttachRequest(hello=pb.WorkerHello(worker_id="w", model="Llama-2-7B", gpu="test", kv_events=source))
        )
        with pytest.raises(grpc.aio.AioRpcError, match=r"kind = 'blocks'"):
            await attach.read()


async def test_a_worker_that_publishes_is_listed_with_its_addresses_and_gets_its_events(scheduler: Harness) -> None:
    attach = scheduler.stub.Attach()
    scheduler.calls.append(attach)
    source = types_pb2.KvEventSource(endpoint="tcp://127.0.0.1:5557", topic="t", format="map")
    hello = pb.WorkerHello(worker_id="w", model="Llama-2-7B", gpu="test", max_total_token_num=6000, kv_events=source)
    await attach.write(pb.AttachRequest(hello=hello))
    await attach.read()
    status = await scheduler.stub.GetStatus(pb.GetStatusRequest())
    assert status.workers[0].kv_events == source
    worker, router = Worker(attach, "w"), await scheduler.route()
    await router.submit(1, prompt=len(PROMPT), max_new=2)
    await worker.step(await worker.plan())
    message = await asyncio.wait_for(attach.read(), PATIENCE_SECONDS)
    assert [len(event.stored.block_hashes) for event in message.kv_events.events] == [2]
    assert (await worker.plan()).decode


async def test_a_block_goes_when_the_step_ends_that_has_taken_its_place() -> None:
    paged = ("scheduler.memory='paged'", "scheduler.watermark=0.0", "scheduler.prefix_cache.kind='blocks'")
    async with Harness(load(None, (*OVERRIDES, *paged))) as scheduler:
        worker = await scheduler.attach(pool=64)  # four blocks, of which the first request leaves two
        await serve(scheduler, worker, 1)
        call = watch(scheduler)
        assert await read(call) == ("w", [("cleared", 0), ("stored", 2)])
        router = await scheduler.route()
        await router.submit(2, prompt=1, max_new=60, produced=range(900, 930))  # so it finds nothing in the cache
        await worker.step(await worker.plan())
        plan = await worker.plan()
        assert plan.max_steps > 2
        assert await read(call) == ("w", [("stored", 1)])
        await worker.step(plan)  # which fills the second of its blocks; the next step takes a third
        await worker.step(plan)
        assert await read(call) == ("w", [("removed", 1)])


def test_a_watcher_that_begins_within_a_batch_misses_nothing_and_the_worker_gets_the_batch_whole() -> None:
    cache, events = BlockCache(16), KvEvents("blocks", 1 << 20)
    worker = events.attach("w", cache, types_pb2.KvEventSource(endpoint="tcp://127.0.0.1:5557"))
    sequence = Sequence(1, 48, 4, prompt_token_ids=range(48))

    def told(watcher: Watcher) -> list[list[str | None]]:
        messages, watcher._pending = watcher._pending, []
        return [[event.WhichOneof("event") for event in message.events.events] for message in messages]

    with events.watched("") as early:
        cache.acquire(sequence)
        sequence.computed_tokens = 16
        cache.commit(sequence)
        with events.watched("w") as late:
            sequence.computed_tokens = 48
            cache.commit(sequence)
            message = worker.take()
            assert message is not None
            assert sum(len(event.stored.block_hashes) for event in message.kv_events.events) == 3
            assert told(early) == [["cleared"], ["stored"], ["stored"]]
            assert told(late) == [["cleared", "stored"], ["stored"]]
        assert worker.take() is None
