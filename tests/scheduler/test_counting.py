"""What is counted, and how often; who is let in under which name; what a client can make grow."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lorrery.scheduler import requests as requests_module
from lorrery.scheduler import streams
from lorrery.scheduler.core.adapters.loads import AdapterLog
from lorrery.scheduler.core.cluster_facts import Arrived
from lorrery.scheduler.core.facts import Facts
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.subscribers.metrics import SchedulerMetrics
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import load
from lorrery.service.settings.sections import MetricsSettings
from lorrery.v1 import scheduler_pb2 as pb
from tests.cluster.harness import PATIENCE_SECONDS
from tests.scheduler.harness import OVERRIDES, Harness, Worker
from tests.scheduler.test_failures import served_by, status_of


@pytest.fixture
async def scheduler() -> AsyncIterator[Harness]:
    async with Harness(load(None, OVERRIDES)) as harness:
        yield harness


def all_ended(scheduler: Harness) -> float:
    (family,) = [f for f in scheduler.registry.collect() if f.name == "lorrery_scheduler_requests"]
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


# --- tokens and requests ----------------------------------------------------------------------------------------------


async def test_a_mixed_step_counts_the_tokens_of_its_prefills() -> None:
    overrides = (*OVERRIDES, "scheduler.batching='chunked'", "scheduler.max_num_batched_tokens=3072")
    async with Harness(load(None, overrides)) as scheduler:
        worker, router = await scheduler.attach(), await scheduler.route()
        await router.submit(1, prompt=10, max_new=500)  # so that it still decodes, whenever the other comes
        await worker.step(await worker.plan(), hand_back=True)
        decode = await worker.plan()
        await router.submit(2, prompt=700, max_new=9)
        mixed = decode
        while not mixed.prefill_handles_u32:
            await worker.step(mixed, hand_back=True)
            mixed = await worker.plan()
        assert mixed.decode
        before = scheduler.value("batch_tokens_sum")
        done = pb.StepDone(
            plan_id=mixed.plan_id,
            start_ps=mixed.start_ps,
            end_ps=mixed.start_ps + 10**9,
            handles_u32=np.array([1, 2], "<u4").tobytes(),
            token_ids_u32=np.array([7, 8], "<u4").tobytes(),
            hand_back=True,
        )
        await worker.call.write(pb.AttachRequest(step=done))
        await worker.plan()
        assert scheduler.value("batch_tokens_sum") - before == 701


async def test_a_router_cannot_let_a_request_keep_more_tokens_than_it_asked_for(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, prompt=10, max_new=50)
    await worker.step(await worker.plan())
    await router.read()
    plan = await worker.plan()
    cancel = pb.RouteRequest(
        cancel_handles_u32=np.array([1], "<u4").tobytes(),
        cancel_kept_u32=np.array([1_000_000], "<u4").tobytes(),
        cancel_cause=pb.CANCEL_CAUSE_STOP_TEXT,
    )
    await router.call.write(cancel)
    await worker.plan_that_leaves(plan)
    assert scheduler.value("tenant_service_tokens_total", tenant="none", kind="output") == 50


@pytest.mark.parametrize("known", [True, False], ids=["its end is known", "its end is not known yet"])
@pytest.mark.parametrize("num_steps", [0, 1, 2], ids=["in prefill", "first token", "second token"])
async def test_a_request_whose_stream_was_resumed_counts_once(scheduler: Harness, num_steps: int, known: bool) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, prompt=10, max_new=50)
    plan = await worker.plan()
    for step in range(num_steps):
        await worker.step(plan)
        await router.read()
        plan = plan if step else await worker.plan()
    if known:
        await scheduler.hang_up(router)
    again = await scheduler.route()
    await again.submit(1, prompt=10, max_new=50, produced=[100, 101][:num_steps], resumed=True)
    plan = await worker.plan_that_leaves(plan)
    for _ in range(plan.max_steps):
        await worker.step(plan)
    tokens, _ = await served_by(worker, again, 1)
    assert len(tokens) == 50 - num_steps
    assert all_ended(scheduler) == scheduler.value("requests_total", outcome="length") == 1
    assert scheduler.value("orphaned_requests_total") == 1
    assert scheduler.value("prompt_tokens_total") == 10
    assert scheduler.value("queue_seconds_count") == 1
    assert scheduler.value("time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("has_token", [True, False], ids=["after a token that was lost", "in its first prefill"])
async def test_a_request_whose_stream_breaks_again_before_its_next_token_counts_once(
    scheduler: Harness, has_token: bool
) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, prompt=10, max_new=5)
    plan = await worker.plan()
    if has_token:  # its router has not received it
        await worker.step(plan)
        plan = await worker.plan()
    for _ in range(2):
        await scheduler.hang_up(router)
        router = await scheduler.route()
        await router.submit(1, prompt=10, max_new=5, resumed=True)
        await worker.step(plan, hand_back=True)
        plan = await worker.plan_that_leaves(await worker.plan())
    for _ in range(plan.max_steps):
        await worker.step(plan)
    tokens, _ = await served_by(worker, router, 1)
    assert len(tokens) == 5
    assert scheduler.value("orphaned_requests_total") == 2
    for once in ("requests_total", "prompt_tokens_total", "queue_seconds_count", "time_to_first_token_seconds_count"):
        expected = 10 if once == "prompt_tokens_total" else 1
        assert scheduler.value(once, **({"outcome": "length"} if once == "requests_total" else {})) == expected


@pytest.mark.parametrize("known", [True, False], ids=["its end is known", "its end is not known yet"])
async def test_a_request_that_waited_when_its_stream_broke_counts_once_too(scheduler: Harness, known: bool) -> None:
    router = await scheduler.route()
    await router.submit(1, prompt=10, max_new=2)
    await router.submit(2, adapter="unknown")
    await router.read()
    if known:
        await scheduler.hang_up(router)
    again = await scheduler.route()
    await again.submit(1, prompt=10, max_new=2, resumed=True)
    await served_by(await scheduler.attach(), again, 1)
    assert scheduler.value("requests_total", outcome="length") == 1
    assert scheduler.value("requests_total", outcome="cancelled") == 0
    assert scheduler.value("prompt_tokens_total") == 10
    assert scheduler.value("queue_seconds_count") == scheduler.value("time_to_first_token_seconds_count") == 1


async def test_what_is_remembered_of_routers_and_errors_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "MAX_REMEMBERED", 2)
    async with Harness(load(None, OVERRIDES)) as scheduler:
        worker = await scheduler.attach()
        for number in range(5):
            router = await scheduler.route()
            await router.submit(number, max_new=50)
            await worker.step(await worker.plan())
            await router.read()
            plan = await worker.plan()
            router.call.cancel()
            await worker.plan_that_leaves(plan)
        for number in range(5):
            scheduler.service._cluster.requests._log_error(f"policy of {number} raised", ValueError())
        requests = scheduler.service._cluster.requests
        assert len(requests._orphans) == len(requests._logged_errors) == 2


# --- names and hellos -------------------------------------------------------------------------------------------------


async def attach(scheduler: Harness, instance_id: str = "", heartbeat_seconds: float = 0.0) -> Worker:
    call = scheduler.stub.Attach()
    scheduler.calls.append(call)
    hello = pb.WorkerHello(
        worker_id="w",
        model="Llama-2-7B",
        gpu="test",
        max_total_token_num=6000,
        instance_id=instance_id,
        heartbeat_seconds=heartbeat_seconds,
    )
    await call.write(pb.AttachRequest(hello=hello))
    await asyncio.wait_for(call.read(), PATIENCE_SECONDS)
    return Worker(call, "w")


async def test_a_worker_that_dials_again_takes_the_place_of_its_old_stream_at_once(scheduler: Harness) -> None:
    old, router = await attach(scheduler, "one"), await scheduler.route()
    await router.submit(1, max_new=2)
    await old.plan()
    new = await attach(scheduler, "one")  # nobody ended the old stream: its host may be cut off
    tokens, finished = await served_by(new, router, 1)
    assert (tokens, finished.usage.num_requeues) == ([100, 101], 1)
    error = await status_of(old)
    assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "the worker has dialled again")
    assert scheduler.value("workers_given_up_total", reason="superseded") == 1
    assert scheduler.value("workers", state="ready") == 1


async def test_another_process_of_the_same_name_is_refused(scheduler: Harness) -> None:
    await attach(scheduler, "one")
    for other in ("two", ""):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await attach(scheduler, other)
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert scheduler.value("workers_lost_total") == 0


async def test_heartbeats_that_are_too_rare_are_refused_in_settings_and_hello() -> None:
    with pytest.raises(SettingsError, match=r"worker\.heartbeat_seconds \(3\) must be at most half of .*\(5\)"):
        load(None, ["worker.heartbeat_seconds=3", "scheduler.worker_timeout_seconds=5"])
    assert load(None, ["worker.heartbeat_seconds=2.5", "scheduler.worker_timeout_seconds=5"])
    for wrong in ("worker.heartbeat_seconds=0.001", "scheduler.worker_timeout_seconds=0.05"):
        with pytest.raises(SettingsError, match="greater than or equal"):
            load(None, [wrong])
    async with Harness(load(None, [*OVERRIDES, "scheduler.worker_timeout_seconds=0.5"])) as scheduler:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await attach(scheduler, heartbeat_seconds=0.3)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "beats every 0.3 s" in (error.value.details() or "")
        await attach(scheduler, heartbeat_seconds=0.25)


@pytest.mark.parametrize("method", ["Route", "Attach"])
async def test_a_stream_without_a_hello_is_ended(
    scheduler: Harness, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(streams, "HELLO_SECONDS", 0.2)
    call = getattr(scheduler.stub, method)()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await asyncio.wait_for(call.read(), PATIENCE_SECONDS)
    assert (error.value.code(), error.value.details()) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "no hello within 0.2 s",
    )


def test_however_many_adapters_are_loaded_their_series_are_few_and_add_up() -> None:
    registry = CollectorRegistry()
    metrics, log = SchedulerMetrics(registry, {}, MetricsSettings(max_adapters=3)), AdapterLog()
    facts = Facts([metrics])
    for number in range(1_000):
        adapter = Adapter(f"lora-{number}", 8)
        facts.publish([Arrived(Sequence(number, 1, 1, adapter=adapter))], 0)
        log.load_ended(adapter, "disk", 0, 10**9, failed=number % 2 > 0)
        log.evicted(adapter, "gpu", 10**12)
    facts.publish(log.take(), 0)
    found = {family.name: family.samples for family in registry.collect() if "adapter" in family.samples[0].labels}
    for name, expected, num_labels in (
        ("loads_by_adapter", 1_000, 5),
        ("failed_loads_by_adapter", 500, 5),
        ("load_seconds_by_adapter", 1.0, 10),
        ("evictions_by_adapter", 1_000, 5),
        ("adapter_resident_seconds", 500.0, 5),
    ):
        samples = found[f"lorrery_scheduler_{name}"]
        assert (len(samples), sum(sample.value for sample in samples)) == (num_labels, pytest.approx(expected))
