"""Adapters that are loaded and unloaded while schedulers come, go and come back."""

import grpc
import pytest

from lorrery.router.adapters import AdapterPaths
from lorrery.service.settings.cluster import Settings
from lorrery.v1 import router_pb2, scheduler_pb2, types_pb2
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog
from tests.router.conftest import TIMEOUT_SECONDS, StartRouter, next_submit
from tests.router.fake_scheduler import Route

LENGTH = types_pb2.FINISH_REASON_LENGTH
Reason = scheduler_pb2.RefusalReason


def told(route: Route) -> list[tuple[str, int]]:
    """Return (id, rank) of each change in a router's hello."""
    return [(change.adapter_id, change.rank) for change in route.hello.adapter_changes.changes]


async def test_loaded_adapters_are_told_to_every_shard_and_again_to_one_that_restarts(
    start_router: StartRouter,
) -> None:
    router = await start_router(2)
    routes = [await router.route(index) for index in range(2)]
    await router.until_connected()
    await router.stub.LoadAdapter(
        router_pb2.LoadAdapterRequest(adapter=types_pb2.Adapter(adapter_id="new", rank=16)), timeout=10
    )
    assert all(scheduler.adapters["new"] == 16 for scheduler in router.schedulers)
    listed = await router.stub.ListAdapters(router_pb2.ListAdaptersRequest(), timeout=TIMEOUT_SECONDS)
    assert [(adapter.adapter_id, adapter.rank) for adapter in listed.adapters] == [("lora-0", 8), ("new", 16)]
    assert listed.model == "Llama-2-7B"
    routes[0].break_off()
    again = await router.route(0)
    assert told(again) == [("new", 16)]
    assert again.hello.router_id == routes[0].hello.router_id != ""
    await router.until_connected()
    await router.stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(adapter_id="new"), timeout=TIMEOUT_SECONDS)
    assert not any("new" in scheduler.adapters for scheduler in router.schedulers)
    again.break_off()
    assert told(await router.route(0)) == [("new", 0)]


async def test_adapters_are_listed_in_the_order_of_their_shard_not_of_their_names(
    start_router: StartRouter,
) -> None:
    router = await start_router(1)
    await router.route(0)
    await router.until_connected()
    for name in ("lora-10", "lora-2", "early"):
        adapter = types_pb2.Adapter(adapter_id=name, rank=8)
        await router.stub.LoadAdapter(router_pb2.LoadAdapterRequest(adapter=adapter), timeout=TIMEOUT_SECONDS)
    listed = await router.stub.ListAdapters(router_pb2.ListAdaptersRequest(), timeout=TIMEOUT_SECONDS)
    assert [adapter.adapter_id for adapter in listed.adapters] == ["lora-0", "lora-10", "lora-2", "early"]


async def test_an_adapter_unloaded_while_a_shard_is_away_is_unknown_there_when_it_is_back(
    start_router: StartRouter,
) -> None:
    router = await start_router(2)
    routes = [await router.route(index) for index in range(2)]
    await router.until_connected()
    adapter = types_pb2.Adapter(adapter_id="new", rank=16)
    await router.stub.LoadAdapter(router_pb2.LoadAdapterRequest(adapter=adapter), timeout=TIMEOUT_SECONDS)
    routes[0].break_off()
    away = router.schedulers[0].address
    await router.until(lambda: not router.sample("lorrery_router_shard_connected", shard=away))
    await router.stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(adapter_id="new"), timeout=TIMEOUT_SECONDS)
    await router.until(lambda: "new" not in router.schedulers[0].adapters)
    await router.stub.LoadAdapter(router_pb2.LoadAdapterRequest(adapter=adapter), timeout=TIMEOUT_SECONDS)
    await router.until(lambda: all("new" in scheduler.adapters for scheduler in router.schedulers))


async def test_an_adapter_loaded_between_the_hellos_is_not_missed(start_router: StartRouter) -> None:
    router = await start_router(2, silent=1)
    late = router.schedulers[1]
    await router.until(lambda: late.num_hellos == 1)
    await router.stub.LoadAdapter(
        router_pb2.LoadAdapterRequest(adapter=types_pb2.Adapter(adapter_id="new", rank=16)), timeout=10
    )
    late.may_answer.set()
    await router.until(lambda: router.sample("lorrery_router_shard_connected", shard=late.address) == 1)
    assert late.adapters["new"] == 16


@pytest.mark.parametrize(
    ("name", "rank", "code", "message"),
    [
        ("", 8, "INVALID_ARGUMENT", "adapter_id is empty"),
        ("a", 0, "INVALID_ARGUMENT", "adapter 'a' has rank 0; it must be at least 1"),
        ("a", 65, "FAILED_PRECONDITION", "adapter 'a' has rank 65; max_lora_rank is 64"),
        ("lora-0", 16, "ALREADY_EXISTS", "adapter 'lora-0' has another rank"),
    ],
)
async def test_an_adapter_that_cannot_be_loaded(
    start_router: StartRouter, name: str, rank: int, code: str, message: str
) -> None:
    router = await start_router()
    await router.route()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.stub.LoadAdapter(
            router_pb2.LoadAdapterRequest(adapter=types_pb2.Adapter(adapter_id=name, rank=rank)), timeout=10
        )
    assert (caught.value.code().name, caught.value.details()) == (code, message)


async def test_unloading_what_nobody_knows_is_not_found(start_router: StartRouter) -> None:
    router = await start_router()
    await router.route()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(adapter_id="none"), timeout=TIMEOUT_SECONDS)
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.NOT_FOUND,
        "adapter 'none' is not loaded",
    )


async def test_what_one_shard_says_of_adapters_is_told_to_the_others_and_to_one_that_connects(
    start_router: StartRouter,
) -> None:
    router = await start_router(3, silent=1)
    routes = [await router.route(index) for index in (0, 2)]
    routes[0].say_changes(AdapterChange(5, "x", 8), AdapterChange(6, "lora-0", 0))
    await router.until(lambda: router.schedulers[2].adapters == {"x": 8})
    router.schedulers[1].may_answer.set()
    await router.until(lambda: router.schedulers[1].adapters == {"x": 8})
    routes[1].say_changes(AdapterChange(4, "x", 64), AdapterChange(7, "y", 16))
    await router.until(lambda: all(s.adapters == {"x": 8, "y": 16} for s in router.schedulers[:2]))


async def test_one_shard_decides_and_the_others_take_its_version_over(start_router: StartRouter) -> None:
    router = await start_router(2)
    for index in range(2):
        await router.route(index)
    await router.until_connected()
    decides, other = sorted(router.schedulers, key=lambda scheduler: scheduler.address)
    for scheduler, version in ((decides, 20), (other, 40)):
        scheduler.change("before", 8, version)  # of which the router has not heard
    await router.stub.LoadAdapter(
        router_pb2.LoadAdapterRequest(adapter=types_pb2.Adapter(adapter_id="new", rank=16)), timeout=10
    )
    assert decides.log.latest("new") == other.log.latest("new") == AdapterChange(21, "new", 16)
    await router.stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(adapter_id="new"), timeout=TIMEOUT_SECONDS)
    assert decides.log.latest("new") == other.log.latest("new") == AdapterChange(22, "new", 0)


async def test_a_resumption_brings_the_adapter_that_the_request_began_with(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    route.say_changes(AdapterChange(5, "x", 8))
    # The frame behind tells that the router has read the one before.
    calls = [router.generate(adapter_id="lora-0")]
    submits = [await next_submit(route)]
    route.send([(submits[0].handle, 3)])
    assert list((await calls[0].read()).token_ids) == [3]
    for _ in range(2):
        calls.append(router.generate(adapter_id="x"))
        submits.append(await next_submit(route))
    old, new = (types_pb2.Adapter(adapter_id="x", rank=rank, version=version) for rank, version in ((8, 5), (32, 9)))
    assert [submit.adapter for submit in submits] == [types_pb2.Adapter(), old, old]
    route.say_pinned(submits[2].handle, new)
    route.say_changes(AdapterChange(12, "x", 0), AdapterChange(13, "lora-0", 64))
    route.send([(submit.handle, 4) for submit in submits])
    for call in calls:
        assert list((await call.read()).token_ids) == [4]
    route.break_off()
    again = await router.route()
    resumed = [await next_submit(again) for _ in calls]
    assert [submit.adapter for submit in resumed] == [types_pb2.Adapter(), old, new]
    assert all(submit.resumed for submit in resumed)
    calls.append(router.generate(adapter_id="lora-0"))
    assert (await next_submit(again)).adapter == types_pb2.Adapter(adapter_id="lora-0", rank=64, version=13)
    for call in calls:
        call.cancel()
    await router.until_empty()


async def test_what_a_load_an_unload_and_one_models_card_send_does_not_grow_with_the_adapters_that_are_known(
    start_router: StartRouter,
) -> None:
    sent: list[list[int]] = []
    for num_known in (10, 1000):
        router = await start_router(2, http="127.0.0.1:0", served_model_names=["Llama-2-7B", "ours"])
        routes = [await router.route(index) for index in range(2)]
        routes[0].say_changes(*(AdapterChange(number + 1, f"known-{number:04}", 8) for number in range(num_known)))
        await router.until(lambda: all(len(fake.adapters) > num_known for fake in router.schedulers))  # noqa: B023
        sent.append([])
        for method, path, body, code in (
            ("POST", "/v1/load_lora_adapter", {"lora_name": "new", "rank": 16}, 200),
            ("POST", "/v1/load_lora_adapter", {"lora_name": "new", "rank": 16}, 400),
            ("POST", "/v1/load_lora_adapter", {"lora_name": "ours", "rank": 16}, 400),
            ("GET", "/v1/models/new", None, 200),
            ("GET", "/v1/models/none", None, 404),
            ("GET", "/v1/models/a%20b", None, 404),
            ("GET", "/v1/models/Llama-2-7B", None, 200),
            ("POST", "/v1/unload_lora_adapter", {"lora_name": "new"}, 200),
        ):
            before = sum(fake.num_bytes for fake in router.schedulers)
            assert await router.http_status(method, path, body) == code
            await router.stub.GetClusterStatus(router_pb2.GetClusterStatusRequest(), timeout=TIMEOUT_SECONDS)
            sent[-1].append(sum(fake.num_bytes for fake in router.schedulers) - before)
        assert all("new" not in fake.adapters for fake in router.schedulers)
    few, many = sent
    assert all(most <= 1.5 * least + 20 for least, most in zip(few, many, strict=True)), sent


def test_an_adapters_folder_is_that_of_its_latest_version_in_whatever_order_the_answers_come() -> None:
    registry = [{"id": "listed", "rank": 8, "path": "/listed"}, {"id": "bare", "rank": 8}]
    settings = Settings.model_validate({"adapters": {"registry": registry, "max_loaded_adapters": 2}})
    log = AdapterLog(["listed", "bare"])
    paths = AdapterPaths(settings, log)
    assert [paths.get(name) for name in ("listed", "bare", "new")] == ["/listed", "", ""]
    log.merge([AdapterChange(10, "new", 8), AdapterChange(20, "new", 8)])
    paths.add("new", 20, "/second")
    paths.add("new", 10, "/first")
    assert paths.get("new") == "/second"
    log.merge([AdapterChange(30, "new", 8), AdapterChange(31, "listed", 16)])  # through other routers
    assert [paths.get(name) for name in ("listed", "new")] == ["", ""]
    paths.add("listed", 31, "/other")
    assert paths.get("listed") == "/other"
