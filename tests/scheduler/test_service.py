"""The scheduler's streams on a real socket, with a worker and a router played by the test."""

import asyncio

import grpc
import grpc.aio
import numpy as np
import pytest
from structlog.testing import capture_logs

from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import types_pb2
from tests.cluster.harness import PATIENCE_SECONDS, wait_until
from tests.scheduler.harness import OVERRIDES, Harness, tokens_of
from tests.scheduler.harness import scheduler as scheduler


async def test_a_request_travels_to_a_worker_and_its_tokens_back(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(7, prompt=10, max_new=3, adapter="a")
    plan = await worker.plan()
    assert [(join.prompt_tokens, join.adapter.rank) for join in plan.joins] == [(10, 8)]
    assert plan.adapter_loads[0].adapter_id == "a"
    await worker.step(plan)
    plan = await worker.plan()
    assert (plan.decode, plan.max_steps) == (True, 2)
    await worker.step(plan)
    await worker.step(plan)
    tokens, finished = await tokens_of(router, 7)
    assert tokens == [100, 101, 102]
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (10, 3)
    assert finished.usage.worker_id == "w"
    assert scheduler.value("requests_total", outcome="length") == 1
    assert scheduler.value("in_flight_requests") == scheduler.value("worker_kv_tokens", worker="w") == 0


@pytest.mark.parametrize(
    ("kwargs", "reason", "words"),
    [
        ({"prompt": 2049}, pb.REFUSAL_REASON_NEVER_FITS, ["2049", "max_req_input_len is 2048"]),
        ({"max_new": 3063}, pb.REFUSAL_REASON_NEVER_FITS, ["3063", "max_req_total_len:3072"]),
        ({"adapter": "who"}, pb.REFUSAL_REASON_UNKNOWN_ADAPTER, ["adapter_id 'who'"]),
        ({"prompt": 0}, pb.REFUSAL_REASON_INVALID, ["prompt has 0 tokens"]),
        ({"max_new": 0}, pb.REFUSAL_REASON_INVALID, ["max_new_tokens is 0"]),
        ({"prompt": 1000, "max_new": 900, "adapter": "big"}, pb.REFUSAL_REASON_NEVER_FITS, ["256 slots", "2100"]),
    ],
)
async def test_what_cannot_be_served_is_refused_at_once(
    scheduler: Harness, kwargs: dict[str, object], reason: int, words: list[str]
) -> None:
    await scheduler.attach(pool=2100)
    router = await scheduler.route()
    await router.submit(1, **kwargs)  # type: ignore[arg-type]
    refused = (await router.read()).refused
    assert (refused.handle, refused.reason) == (1, reason)
    assert all(word in refused.message for word in words), refused.message
    assert scheduler.value("in_flight_requests") == 0


def _submit(handle: int, **fields: object) -> pb.Submit:
    prompt = np.arange(10, dtype="<u4").tobytes()
    return pb.Submit(
        **{"handle": handle, "prompt_token_ids_u32": prompt, "sampling": pb.Sampling(max_new_tokens=4), **fields}
    )


MALFORMED = {
    "prompt": (_submit(1, prompt_token_ids_u32=b"12345"), "must be a multiple of element size"),
    "produced": (_submit(1, produced_token_ids_u32=b"123"), "array of 3 bytes"),
    "stop sequence": (
        _submit(1, sampling=pb.Sampling(max_new_tokens=4, stop_sequences_u32=[b"1234", b"12"])),
        "must be a multiple of element size",
    ),
    "nothing left": (_submit(1, produced_token_ids_u32=bytes(16)), "4 of 4 tokens (max_new_tokens) are produced"),
    "no prompt": (_submit(1, produced_token_ids_u32=bytes(4), prompt_token_ids_u32=b""), "after a prompt of 0"),
    "adapter": (_submit(1, adapter_id="x" * 1_000_000), "adapter_id has 1000000 characters; at most 512 are allowed"),
    "tenant": (_submit(1, tenant_id="x" * 513), "tenant_id has 513 characters"),
    "request": (_submit(1, request_id="x" * 513), "request_id has 513 characters"),
}


@pytest.mark.parametrize("row", MALFORMED)
async def test_a_request_that_cannot_be_read_is_refused_and_its_stream_goes_on(scheduler: Harness, row: str) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(7, max_new=1)
    plan = await worker.plan()
    message, words = MALFORMED[row]
    await router.call.write(pb.RouteRequest(submit=message))
    refused = (await router.read()).refused
    assert (refused.handle, refused.reason) == (1, pb.REFUSAL_REASON_INVALID)
    assert refused.message.startswith("the scheduler cannot read the request: ")
    assert words in refused.message
    assert len(refused.message) < 500
    await worker.step(plan)
    assert (await tokens_of(router, 7))[0] == [100]
    assert scheduler.value("requests_total", outcome="refused") == 1


async def test_a_handle_that_is_taken_and_half_a_handle_in_a_cancel_disturb_nobody(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(7, max_new=1)
    await router.submit(7, max_new=3)
    await router.submit(8, max_new=2)
    plan = await worker.plan()
    await scheduler.until("in_flight_requests", 2)
    await router.call.write(pb.RouteRequest(cancel_handles_u32=np.array([8], "<u4").tobytes() + b"12"))
    finished = (await router.read()).tokens.finished
    assert [(end.handle, end.reason) for end in finished] == [(8, types_pb2.FINISH_REASON_ABORTED)]
    await worker.step(plan)
    assert (await tokens_of(router, 7))[0] == [100]


async def test_requests_give_up_after_worker_wait_seconds_and_wait_for_a_worker_until_then(scheduler: Harness) -> None:
    async with Harness(load(None, [*OVERRIDES, "scheduler.worker_wait_seconds=0.3"])) as impatient:
        router = await impatient.route()
        await router.submit(1)
        refused = (await router.read()).refused
        assert refused.reason == pb.REFUSAL_REASON_NO_WORKER
    router = await scheduler.route()
    await router.submit(2)
    await scheduler.until("unplaced_requests", 1)
    worker = await scheduler.attach()
    assert len((await worker.plan()).joins) == 1


async def test_a_full_queue_refuses_new_requests_but_not_resumed_ones(scheduler: Harness) -> None:
    router = await scheduler.route()
    for handle in (1, 2, 3, 4):
        await router.submit(handle)
    refused = (await router.read()).refused
    assert (refused.handle, refused.reason) == (4, pb.REFUSAL_REASON_QUEUE_FULL)
    await router.submit(5, produced=[9])
    await router.submit(6, resumed=True)
    worker = await scheduler.attach()
    assert len((await worker.plan()).joins) == 5


async def test_a_worker_of_another_model_is_refused(scheduler: Harness) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await scheduler.attach(model="BLOOM-176B")  # before any welcome
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "BLOOM-176B" in (error.value.details() or "")


async def test_a_second_worker_of_one_name_is_refused_and_the_first_goes_on(scheduler: Harness) -> None:
    worker, router = await scheduler.attach("twin"), await scheduler.route()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await scheduler.attach("twin")
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "'twin' is attached already" in (error.value.details() or "")
    assert "set worker.name" in (error.value.details() or "")
    await router.submit(1, max_new=1)
    await worker.step(await worker.plan())
    assert (await tokens_of(router, 1))[0] == [100]


@pytest.mark.parametrize("name", ["", "a b", "a\n"])
async def test_a_worker_needs_a_name_that_can_be_a_label(scheduler: Harness, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await scheduler.attach(name)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_lost_workers_sequences_go_on_elsewhere_with_their_tokens(scheduler: Harness) -> None:
    first, router = await scheduler.attach("first"), await scheduler.route()
    await router.submit(1, max_new=4)
    plan = await first.plan()
    await first.step(plan)
    plan = await first.plan()
    await first.step(plan, hand_back=False)
    second = await scheduler.attach("second")
    assert np.frombuffer((await router.read()).tokens.token_ids_u32, "<u4").tolist() == [100]
    assert np.frombuffer((await router.read()).tokens.token_ids_u32, "<u4").tolist() == [101]
    first.call.cancel()
    plan = await second.plan()
    assert np.frombuffer(plan.joins[0].produced_token_ids_u32, "<u4").tolist() == [100, 101]
    assert np.frombuffer(plan.prefill_new_tokens_u32, "<u4").tolist() == [12]
    await second.step(plan)
    await second.step(await second.plan())
    tokens, finished = await tokens_of(router, 1)
    assert tokens == [102, 103]
    assert (finished.usage.completion_tokens, finished.usage.num_requeues) == (4, 1)
    assert finished.usage.prompt_tokens == 10
    assert finished.usage.worker_id == "second"
    assert scheduler.value("workers_lost_total") == scheduler.value("requeued_sequences_total") == 1


async def test_a_request_on_which_workers_are_lost_ends_and_its_neighbour_goes_on(
    scheduler: Harness,
) -> None:
    router = await scheduler.route()
    await router.submit(1, max_new=4)
    for number in range(3):
        worker = await scheduler.attach(f"w{number}")
        assert len((await worker.plan()).joins) == 1
        if number == 2:
            await router.submit(2, max_new=1)
            await scheduler.until("in_flight_requests", 2)
        worker.call.cancel()
        await scheduler.until("workers_lost_total", number + 1)
    refused = (await router.read()).refused
    assert (refused.handle, refused.reason) == (1, pb.REFUSAL_REASON_WORKERS_LOST)
    assert "3 workers were lost" in refused.message
    worker = await scheduler.attach("last")
    plan = await worker.plan()
    assert len(plan.joins) == 1
    await worker.step(plan)
    assert len((await tokens_of(router, 2))[0]) == 1
    assert scheduler.value("in_flight_requests") == 0


async def test_a_silent_worker_is_lost_and_what_it_says_later_is_dropped() -> None:
    async with Harness(load(None, [*OVERRIDES, "scheduler.worker_timeout_seconds=0.5"])) as scheduler:
        silent, router = await scheduler.attach("silent"), await scheduler.route()
        await router.submit(1, max_new=2)
        await silent.plan()
        with pytest.raises(grpc.aio.AioRpcError, match=r"nothing was heard of the worker for 0\.5 s") as error:
            await asyncio.wait_for(silent.call.read(), PATIENCE_SECONDS)
        assert error.value.code() is grpc.StatusCode.ABORTED
        assert scheduler.value("workers_given_up_total", reason="silent") == 1
        other = await scheduler.attach("other")
        await other.step(await other.plan())
        await other.step(await other.plan())
        tokens, finished = await tokens_of(router, 1)
        assert (tokens, finished.usage.worker_id) == ([100, 101], "other")


async def test_a_draining_worker_keeps_what_runs_and_gives_back_what_waits(scheduler: Harness) -> None:
    first, router = await scheduler.attach("first", pool=40), await scheduler.route()
    await router.submit(1, prompt=20, max_new=4)
    plan = await first.plan()
    await router.submit(2, prompt=20, max_new=3)
    await first.step(plan)
    plan = await first.plan()
    assert plan.decode
    await first.call.write(pb.AttachRequest(draining=pb.WorkerDraining()))
    second = await scheduler.attach("second", pool=40)
    moved = await second.plan()
    assert [join.sampling.max_new_tokens for join in moved.joins] == [3]
    for _ in range(3):
        await first.step(plan)
    tokens, finished = await tokens_of(router, 1)
    assert (len(tokens), finished.usage.worker_id) == (4, "first")
    status = await scheduler.stub.GetStatus(pb.GetStatusRequest())
    assert {w.worker_id: w.state for w in status.workers}["first"] == types_pb2.WORKER_STATE_DRAINING


async def test_a_worker_that_takes_leave_as_soon_as_it_is_welcomed_is_not_a_loss(scheduler: Harness) -> None:
    worker, router = await scheduler.attach("first"), await scheduler.route()
    await worker.call.write(pb.AttachRequest(draining=pb.WorkerDraining()))
    await worker.call.done_writing()
    assert await worker.call.read() is grpc.aio.EOF
    assert await worker.call.code() is grpc.StatusCode.OK
    assert scheduler.value("workers_lost_total") == 0
    await router.submit(1, max_new=1)
    other = await scheduler.attach("other")
    await other.step(await other.plan())
    assert (await tokens_of(router, 1))[1].usage.worker_id == "other"


async def test_a_cancel_interrupts_the_plan_and_frees_everything(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, max_new=50)
    await worker.step(await worker.plan())
    plan = await worker.plan()
    await router.cancel(1)
    message = await asyncio.wait_for(worker.call.read(), PATIENCE_SECONDS)
    assert message.interrupt.plan_id == plan.plan_id
    # Nothing else is there to do: the worker hears of the leave by a plan of no step.
    plan = await worker.plan_that_leaves(plan)
    assert len(np.frombuffer(plan.leaves_u32, "<u4")) == 1
    assert not plan.max_steps
    assert scheduler.value("in_flight_requests") == scheduler.value("worker_kv_tokens", worker="w") == 0
    await router.submit(2, max_new=1)
    await worker.step(await worker.plan())
    assert len((await tokens_of(router, 2))[0]) == 1
    assert scheduler.value("requests_total", outcome="cancelled") == 1


async def test_a_router_that_goes_takes_its_requests_with_it(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, max_new=50)
    await worker.step(await worker.plan())
    plan = await worker.plan()
    router.call.cancel()
    assert (await asyncio.wait_for(worker.call.read(), PATIENCE_SECONDS)).interrupt.plan_id == plan.plan_id
    assert not (await worker.plan_that_leaves(plan)).max_steps
    other = await scheduler.route()
    await other.submit(1, max_new=1)
    await worker.step(await worker.plan())
    assert (await tokens_of(other, 1))[0] == [200]
    assert scheduler.value("in_flight_requests") == scheduler.value("worker_kv_tokens", worker="w") == 0


async def test_adapters_come_and_go_at_run_time(scheduler: Harness) -> None:
    stub = scheduler.stub
    await stub.RegisterAdapter(pb.RegisterAdapterRequest(adapter=types_pb2.Adapter(adapter_id="new", rank=16)))
    router = await scheduler.route(pb.AdapterChange(adapter_id="older", rank=4, version=1))
    status = await stub.GetStatus(pb.GetStatusRequest())
    assert {adapter.adapter_id: adapter.rank for adapter in status.adapters} == {
        "a": 8,
        "big": 64,
        "new": 16,
        "older": 4,
    }
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.RegisterAdapter(pb.RegisterAdapterRequest(adapter=types_pb2.Adapter(adapter_id="new", rank=8)))
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.RegisterAdapter(pb.RegisterAdapterRequest(adapter=types_pb2.Adapter(adapter_id="huge", rank=65)))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await stub.UnregisterAdapter(pb.UnregisterAdapterRequest(adapter_id="new"))
    (told,) = (await router.read()).adapter_changes.changes
    assert (told.adapter_id, told.rank) == ("new", 0)
    await router.submit(1, adapter="new")
    assert (await router.read()).refused.reason == pb.REFUSAL_REASON_UNKNOWN_ADAPTER


async def test_while_a_worker_drains_no_other_is_asked_to_move(scheduler: Harness) -> None:
    await scheduler.attach("first")
    second = await scheduler.attach("second")

    async def demand() -> tuple[int, str]:
        answer = await scheduler.stub.GetDemand(pb.GetDemandRequest(), timeout=PATIENCE_SECONDS)
        return answer.load.num_workers, answer.first_to_leave

    assert await demand() == (2, "second")
    await second.call.write(pb.AttachRequest(draining=pb.WorkerDraining()))
    for expected in ((1, ""), (1, "first")):

        async def it_is(expected: tuple[int, str] = expected) -> bool:
            return await demand() == expected

        await wait_until(it_is)
        await second.call.done_writing()


async def test_draining_refuses_new_requests_and_ends_with_the_last(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(), await scheduler.route()
    await router.submit(1, max_new=2)
    plan = await worker.plan()
    drained = asyncio.create_task(scheduler.service.drain())
    assert (await router.read()).WhichOneof("message") == "draining"
    await router.submit(2)
    assert (await router.read()).refused.reason == pb.REFUSAL_REASON_DRAINING
    assert not drained.done()
    await worker.step(plan)
    await worker.step(await worker.plan())
    await asyncio.wait_for(drained, PATIENCE_SECONDS)
    tokens, _ = await tokens_of(router, 1)
    assert tokens == [100, 101]


async def test_a_worker_whose_stream_the_stopping_scheduler_ends_is_not_lost(scheduler: Harness) -> None:
    running = asyncio.Event()

    async def set_ready(_ready: bool) -> None:
        running.set()

    service = asyncio.create_task(scheduler.service.run(set_ready))
    await running.wait()
    lost = await scheduler.attach("lost")
    await scheduler.attach("stays")
    await scheduler.service.drain()
    with capture_logs() as events:
        lost.call.cancel()  # before the scheduler ends streams
        await scheduler.until("workers_lost_total", 1)
        service.cancel()
        await asyncio.wait([service])
        await scheduler.server.stop(None)
        await wait_until(lambda: scheduler.value("workers", state="ready") == 0)
    ends = [(event["event"], event["worker_id"]) for event in events if "worker_id" in event]
    assert ends == [("worker_lost", "lost"), ("worker_left", "stays")]
    assert scheduler.value("workers_lost_total") == 1


async def test_a_stream_that_fails_while_its_hello_is_being_written_ends_with_its_status() -> None:
    hello = pb.RouteRequest(hello=pb.RouterHello(router_id="r")).SerializeToString()
    async with Harness(load(overrides=OVERRIDES)) as harness:

        async def ended() -> grpc.StatusCode:
            call = harness.channel.stream_stream("/lorrery.v1.SchedulerService/Route")(timeout=PATIENCE_SECONDS)
            await call.write(hello)
            await call.write(b"\x0b")  # a group that begins, and nothing in it
            while await call.read() is not grpc.aio.EOF:
                pass
            return await call.code()

        async def code() -> grpc.StatusCode:
            try:
                return await ended()
            except grpc.aio.AioRpcError as error:
                return error.code()

        for _ in range(10):
            assert {*await asyncio.gather(*(code() for _ in range(20)))} == {grpc.StatusCode.INVALID_ARGUMENT}
