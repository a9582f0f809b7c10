"""Loads and unloads at run time, as routers and operators see them on a real socket, with the routers played."""

import asyncio
import json
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from lorrery.loadgen.wire import adapter_figures
from lorrery.router.wire import shard_status
from lorrery.scheduler.adapters import LoadedAdapters
from lorrery.service.errors import FormatError, LorreryError, Reason
from lorrery.service.network.status import reason_of
from lorrery.service.settings.cluster import load
from lorrery.v1 import router_pb2, types_pb2
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary.adapters import AdapterFigures, summed
from tests.cluster.harness import wait_until
from tests.scheduler.harness import OVERRIDES, Harness, Router, Worker, tokens_of


def change(adapter_id: str, version: int, rank: int) -> pb.AdapterChange:
    return pb.AdapterChange(adapter_id=adapter_id, version=version, rank=rank)


def told(changes: pb.AdapterChanges) -> list[tuple[str, int]]:
    return [(change.adapter_id, change.rank) for change in changes.changes]


async def known(harness: Harness) -> dict[str, int]:
    status = await harness.stub.GetStatus(pb.GetStatusRequest())
    return {adapter.adapter_id: adapter.rank for adapter in status.adapters}


async def register(harness: Harness, adapter_id: str, rank: int, version: int = 0) -> types_pb2.Adapter:
    adapter = types_pb2.Adapter(adapter_id=adapter_id, rank=rank, version=version)
    answer = await harness.stub.RegisterAdapter(pb.RegisterAdapterRequest(adapter=adapter))
    return answer.adapter


async def replace(harness: Harness, adapter_id: str, rank: int) -> types_pb2.Adapter:
    adapter = types_pb2.Adapter(adapter_id=adapter_id, rank=rank)
    request = pb.RegisterAdapterRequest(adapter=adapter, when_known=pb.WHEN_KNOWN_REPLACE)
    return (await harness.stub.RegisterAdapter(request)).adapter


async def unregister(harness: Harness, adapter_id: str, version: int = 0) -> int:
    request = pb.UnregisterAdapterRequest(adapter_id=adapter_id, version=version)
    return (await harness.stub.UnregisterAdapter(request)).version


async def run(worker: Worker, plan: pb.Plan) -> None:
    """Run plan after plan, a step of each."""
    while True:
        await worker.step(plan, hand_back=True)
        plan = await worker.plan()


async def next_changes(router: Router) -> list[tuple[str, int]]:
    while (message := await router.read()).WhichOneof("message") == "tokens":
        pass
    assert message.WhichOneof("message") == "adapter_changes"
    return told(message.adapter_changes)


@pytest.fixture
async def scheduler():
    async with Harness(load(None, OVERRIDES)) as harness:
        yield harness


async def test_every_router_hears_of_a_load_and_of_an_unload_and_those_to_come_in_the_hello(scheduler: Harness) -> None:
    routers = [await scheduler.route(), await scheduler.route()]
    await register(scheduler, "new", 16)
    await register(scheduler, "new", 16)  # known already
    await unregister(scheduler, "a")
    for router in routers:
        assert [await next_changes(router), await next_changes(router)] == [[("new", 16)], [("a", 0)]]
    late = await scheduler.route()
    assert late.hello.adapter_changes.whole
    assert told(late.hello.adapter_changes) == [("new", 16), ("a", 0)]
    assert await known(scheduler) == {"big": 64, "new": 16}


async def test_the_status_has_as_many_adapters_as_are_asked_for(scheduler: Harness) -> None:
    await scheduler.attach()
    for name, known_as in (("big", [("big", 64)]), ("none", [])):
        status = await scheduler.stub.GetStatus(pb.GetStatusRequest(adapter_id=name))
        assert [(adapter.adapter_id, adapter.rank) for adapter in status.adapters] == known_as
        assert not status.workers
    status = await scheduler.stub.GetStatus(pb.GetStatusRequest(no_adapters=True))
    assert (len(status.adapters), len(status.workers)) == (0, 1)


async def test_the_status_has_the_figures_of_adapters_if_they_are_asked_for(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, adapter="a")
    await worker.plan()
    assert not (await scheduler.stub.GetStatus(pb.GetStatusRequest())).HasField("adapter_figures")
    before = time.monotonic()
    answer = await scheduler.stub.GetStatus(pb.GetStatusRequest(adapter_figures=True))
    counted = scheduler.service._cluster.adapter_figures()
    status = router_pb2.GetClusterStatusResponse(shards=[shard_status("", True, answer)])
    [read] = adapter_figures(status) or []
    assert counted["a"].num_loads == 1
    stayed_ps = counted["a"].resident_ps - read["a"].resident_ps
    assert 0 < stayed_ps < (time.monotonic() - before) * 1e12
    [resident] = summed([counted], [read]).values()
    assert resident == AdapterFigures(resident_ps=stayed_ps)
    with pytest.raises(ValueError, match="less"):
        summed([read], [counted])


async def test_a_load_sends_routers_no_more_when_more_adapters_are_known(scheduler: Harness) -> None:
    router, sizes = await scheduler.route(), []
    for first, last in ((1, 10), (11, 1000)):
        changes = [change(f"known-{version:04}", version, 8) for version in range(first, last + 1)]
        await scheduler.route(*changes)
        await next_changes(router)
        await register(scheduler, f"new-{last:04}", 16)
        sizes.append((await router.read()).ByteSize())
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("stale_first", [True, False])
async def test_whichever_router_connects_first_the_latest_change_holds(scheduler: Harness, stale_first: bool) -> None:
    stale = [change("x", 5, 8), change("y", 6, 8), change("a", 7, 0)]
    fresh = [change("x", 9, 0), change("y", 10, 32), change("a", 11, 64)]
    for told_by in [stale, fresh] if stale_first else [fresh, stale]:
        await scheduler.route(*told_by)
    assert await known(scheduler) == {"a": 64, "big": 64, "y": 32}


async def test_what_one_router_brings_is_passed_on_to_the_others(scheduler: Harness) -> None:
    first = await scheduler.route()
    second = await scheduler.route(change("x", 5, 8))
    assert await next_changes(first) == [("x", 8)]
    await first.call.write(pb.RouteRequest(adapter_changes=pb.AdapterChanges(changes=[change("x", 9, 0)])))
    assert await next_changes(second) == [("x", 0)]
    assert (await register(scheduler, "x", 16, version=7)) == types_pb2.Adapter()  # older than the unload
    assert (await register(scheduler, "x", 16, version=12)).version == 12
    assert [await next_changes(first), await next_changes(second)] == [[("x", 16)], [("x", 16)]]
    assert await unregister(scheduler, "x", version=12) == 12  # not newer
    assert (await known(scheduler))["x"] == 16


async def test_a_change_that_a_router_may_not_bring_is_left_out(scheduler: Harness) -> None:
    await scheduler.route(change("x y", 5, 8), change("Llama-2-7B", 6, 8), change("huge", 7, 65), change("ok", 8, 64))
    assert await known(scheduler) == {"a": 8, "big": 64, "ok": 64}


async def test_a_load_again_under_another_rank_is_another_adapter_for_the_worker(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    first = await register(scheduler, "x", 8)
    await next_changes(router)
    await router.submit(1, adapter="x", max_new=500, pinned=first)
    plan = await worker.plan()
    assert plan.joins[0].adapter == first
    await unregister(scheduler, "x")
    loading = asyncio.create_task(register(scheduler, "x", 32))
    assert await next_changes(router) == [("x", 0)]
    while not loading.done():  # it takes effect at a boundary
        await worker.step(plan, hand_back=True)
        plan = await worker.plan()
    second = await loading
    assert second.version > first.version
    assert await next_changes(router) == [("x", 32)]
    await router.submit(2, adapter="x", max_new=3, pinned=first)  # the router has not heard of it yet
    while (message := await router.read()).WhichOneof("message") == "tokens":
        pass
    pinned = message.adapter_pinned
    assert (pinned.handle, pinned.adapter) == (2, second)
    while len(worker.lengths) < 2:
        await worker.step(plan, hand_back=True)
        plan = await worker.plan()
    assert plan.joins[0].adapter == second
    assert [adapter.version for adapter in plan.adapter_loads] == [second.version]
    status = await scheduler.stub.GetStatus(pb.GetStatusRequest())
    assert list(status.workers[0].resident_adapters) == ["x"]


async def test_the_log_names_the_rank_that_was_loaded_or_unloaded(scheduler: Harness) -> None:
    with capture_logs() as events:
        await register(scheduler, "x", 16)
        await unregister(scheduler, "x")
        await unregister(scheduler, "big")
        await scheduler.route(change("never-known", 5, 0))
    logged = [(event["event"], event["adapter_id"], event.get("rank")) for event in events if "adapter_id" in event]
    assert logged == [
        ("adapter_loaded", "x", 16),
        ("adapter_unloaded", "x", 16),
        ("adapter_unloaded", "big", 64),
        ("adapter_unloaded", "never-known", None),
    ]


async def test_a_load_in_place_is_one_change_and_what_runs_keeps_the_version_before(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    first = await replace(scheduler, "x", 8)  # not known before
    await next_changes(router)
    await router.submit(1, adapter="x", max_new=500, pinned=first)
    plan = await worker.plan()
    running = asyncio.create_task(run(worker, plan))
    second = await replace(scheduler, "x", 8)  # of the same rank, but its weights may be others
    third = await replace(scheduler, "x", 32)
    assert first.version < second.version < third.version
    assert [await next_changes(router), await next_changes(router)] == [[("x", 8)], [("x", 32)]]
    assert plan.joins[0].adapter == first
    await router.submit(2, adapter="x", max_new=3, pinned=first)
    while (message := await router.read()).WhichOneof("message") != "adapter_pinned":
        assert message.WhichOneof("message") == "tokens"
    pinned = message.adapter_pinned
    assert (pinned.handle, pinned.adapter) == (2, third)
    assert (await known(scheduler))["x"] == 32
    running.cancel()


async def test_a_load_in_place_that_is_refused_leaves_the_adapter(scheduler: Harness) -> None:
    kept = await register(scheduler, "x", 8)
    with pytest.raises(grpc.aio.AioRpcError, match="max_lora_rank is 64"):
        await replace(scheduler, "x", 65)
    assert await register(scheduler, "x", 8) == kept


async def test_a_load_that_may_not_find_its_adapter_known_is_refused_if_it_does(scheduler: Harness) -> None:
    new = types_pb2.Adapter(adapter_id="x", rank=8)
    request = pb.RegisterAdapterRequest(adapter=new, when_known=pb.WHEN_KNOWN_REFUSE)
    answers = await asyncio.gather(
        *(scheduler.stub.RegisterAdapter(request) for _ in range(10)), return_exceptions=True
    )
    errors = [answer.code() for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert errors == [grpc.StatusCode.ALREADY_EXISTS] * 9


async def test_a_load_in_place_needs_room_only_if_the_name_has_none() -> None:
    async with Harness(load(None, [*OVERRIDES, "adapters.max_loaded_adapters=1"])) as scheduler:
        await register(scheduler, "x", 8)
        assert (await replace(scheduler, "x", 16)).rank == 16
        with pytest.raises(grpc.aio.AioRpcError, match="max_loaded_adapters is 1"):
            await replace(scheduler, "a", 16)  # of the settings, which do not count
        assert (await known(scheduler))["a"] == 8


async def test_a_resumed_request_goes_on_with_the_adapter_it_brings(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route(change("x", 9, 0))
    old = types_pb2.Adapter(adapter_id="x", rank=8, version=5)
    await router.submit(1, adapter="x", max_new=3, produced=[1], resumed=True, pinned=old)
    plan = await worker.plan()
    assert plan.joins[0].adapter == old
    await router.submit(2, adapter="x", pinned=old)
    assert (await router.read()).refused.reason == pb.REFUSAL_REASON_UNKNOWN_ADAPTER
    await worker.step(plan)
    await worker.step(await worker.plan())
    assert (await tokens_of(router, 1))[0] == [101, 102]


@pytest.mark.parametrize("how", ["resumed", "waited"])
async def test_an_old_version_that_comes_to_a_worker_later_leaves_it_when_its_request_has_ended(how: str) -> None:
    async with Harness(load(None, OVERRIDES)) as scheduler:
        router, old = await scheduler.route(), types_pb2.Adapter(adapter_id="x", rank=8, version=5)
        cluster = scheduler.service._cluster
        if how == "resumed":
            worker = await scheduler.attach()
            await router.submit(1, adapter="x", max_new=2, resumed=True, pinned=old)
        else:
            old = await register(scheduler, "x", 8)
            await router.submit(1, adapter="x", max_new=2, pinned=old)
            await wait_until(lambda: cluster.core.num_unplaced == 1, what="the request to wait")
            await unregister(scheduler, "x")
            worker = await scheduler.attach()
        plan = await worker.plan()
        assert plan.joins[0].adapter == old
        adapters = cluster.workers["w"].replica.adapters
        assert list(adapters.gpu) == list(adapters.host) == [f"x@{old.version}"]
        await worker.step(plan, hand_back=True)
        await worker.step(await worker.plan())
        await wait_until(lambda: not (adapters.gpu or adapters.host), what="the adapter to be gone")
        assert "w" in cluster.workers


async def test_loads_are_bounded(scheduler: Harness) -> None:
    async with Harness(load(None, [*OVERRIDES, "adapters.max_loaded_adapters=2"])) as bounded:
        for name in ("x", "y"):
            await register(bounded, name, 8)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await register(bounded, "z", 8)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.value.details() == "2 adapters are loaded; max_loaded_adapters is 2; unload some first"
        await unregister(bounded, "x")
        await register(bounded, "z", 8)


@pytest.mark.parametrize(
    ("setting", "name"),
    [("scheduler.adapters_file='{}/kept'", "kept"), ("scheduler.journal='{}/j.jsonl'", "j.jsonl.adapters")],
)
async def test_a_scheduler_with_a_file_knows_adapters_before_any_router_is_back(
    tmp_path: Path, setting: str, name: str
) -> None:
    settings = load(None, [*OVERRIDES, setting.format(tmp_path)])
    async with Harness(settings) as first:
        version = (await register(first, "x", 8)).version
        await unregister(first, "big")
        await first.route(change("y", 5, 4))
        await wait_until(lambda: '"y"' in (tmp_path / name).read_text())
        first.service._cluster.close_journal()
    async with Harness(settings) as second:
        assert await known(second) == {"a": 8, "y": 4, "x": 8}
        assert (await register(second, "z", 8)).version > version
        assert told((await second.route()).hello.adapter_changes) == [("y", 4), ("x", 8), ("big", 0), ("z", 8)]
        second.service._cluster.close_journal()


async def test_a_file_that_cannot_be_written_costs_no_load(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    async with Harness(load(None, [*OVERRIDES, f"scheduler.adapters_file='{folder}/kept'"])) as harness:
        folder.rmdir()
        await register(harness, "x", 8)
        assert "x" in await known(harness)


@pytest.mark.parametrize("content", ["", "[]", '{"kind": "journal", "format_version": 1}', '{"kind": 1}'])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "adapters"
    path.write_text(content)
    with pytest.raises(FormatError, match=f"scheduler.adapters_file: {path}: "):
        LoadedAdapters(load(None, [f"scheduler.adapters_file='{path}'"]))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LorreryError, match=f"scheduler.adapters_file: {tmp_path}: Is a directory"):
        LoadedAdapters(load(None, [f"scheduler.adapters_file='{tmp_path}'"]))


def test_the_file_keeps_what_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "adapters"
    record = {"kind": "adapters", "format_version": 1, "forgotten": 9, "changes": [[12, "x", 8]]}
    path.write_text(json.dumps(record))
    adapters = LoadedAdapters(load(None, [f"scheduler.adapters_file='{path}'"]))
    assert (adapters.log.forgotten, adapters.rank("x")) == (9, 8)


async def worker_that_is_there(scheduler: Harness) -> types_pb2.Worker:
    (worker,) = (await scheduler.stub.GetStatus(pb.GetStatusRequest())).workers
    return worker


async def test_a_load_returns_when_the_worker_has_the_adapter_and_before_that_no_one_knows_it(
    scheduler: Harness,
) -> None:
    await scheduler.attach()
    router = await scheduler.route()
    await scheduler.service._cluster.adapters.load("new", 16)
    assert (await worker_that_is_there(scheduler)).resident_adapters == ["new"]
    assert await next_changes(router) == [("new", 16)]
    assert scheduler.value("adapter_loads_total", tier="disk", outcome="ok") == 1
    await register(scheduler, "new", 16)  # known already
    assert scheduler.value("adapter_loads_total", tier="disk", outcome="ok") == 1


async def test_a_load_that_fails_is_an_error_and_changes_nothing(scheduler: Harness) -> None:
    await scheduler.attach()
    scheduler.service._cluster.set_faults(["adapter_load_failure,adapter=new"], add=False)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await register(scheduler, "new", 16)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error.value) == Reason.ADAPTER_LOAD
    assert "adapter 'new' could not be loaded on worker w" in (error.value.details() or "")
    assert "new" not in await known(scheduler)
    assert scheduler.value("adapter_loads_total", tier="disk", outcome="failed") == 3
    with pytest.raises(grpc.aio.AioRpcError):  # another scheduler has decided; this one cannot follow
        await register(scheduler, "new", 16, version=5)
    await unregister(scheduler, "new")  # as the router does
    scheduler.service._cluster.set_faults([], add=False)
    assert (await register(scheduler, "new", 16)).version > 5


async def test_a_load_waits_for_no_worker_that_is_gone_or_drains(scheduler: Harness) -> None:
    worker = await scheduler.attach()
    scheduler.service._cluster.set_faults(["slow_adapter_load,factor=1000000000"], add=False)
    loading = asyncio.create_task(register(scheduler, "new", 16))
    await wait_until(lambda: bool(scheduler.service._cluster.workers["w"].replica.adapters.aside), what="a load")
    worker.call.cancel()
    assert (await loading).rank == 16
    assert (await known(scheduler))["new"] == 16


async def test_a_load_whose_caller_gives_up_registers_nothing(scheduler: Harness) -> None:
    await scheduler.attach()
    scheduler.service._cluster.set_faults(["slow_adapter_load,factor=1000000000,first=1"], add=False)
    loading = asyncio.create_task(register(scheduler, "new", 16))
    await wait_until(lambda: bool(scheduler.service._cluster.workers["w"].replica.adapters.aside), what="a load")
    loading.cancel()
    await asyncio.wait([loading])
    assert (await register(scheduler, "new", 8)).rank == 8
    assert (await known(scheduler))["new"] == 8


async def test_a_replaced_version_leaves_the_workers_once_no_request_has_it(scheduler: Harness) -> None:
    await register(scheduler, "late", 8)
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, max_new=1, adapter="late")
    plan = await worker.plan()
    (old,) = [adapter.version for adapter in plan.adapter_loads]
    await worker.step(plan)
    await scheduler.route(change("late", old + 1, 16))
    assert list((await worker.plan()).adapter_evictions) == [f"late@{old}"]
    await router.submit(2, max_new=1, adapter="late")
    assert [adapter.rank for adapter in (await worker.plan()).adapter_loads] == [16]
