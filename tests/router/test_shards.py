"""Schedulers that come, go and come back."""

import asyncio
import signal
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from lorrery.service.entry_point import NO_SCHEDULER_TO_COME
from lorrery.v1 import router_pb2, scheduler_pb2, types_pb2
from tests.router.conftest import TIMEOUT_SECONDS, StartRouter, everything, failure, next_submit
from tests.router.fake_scheduler import from_u32

LENGTH = types_pb2.FINISH_REASON_LENGTH
Reason = scheduler_pb2.RefusalReason


@pytest.mark.parametrize(
    ("reason", "code", "details"),
    [
        ("INVALID", "INVALID_ARGUMENT", "why"),
        ("NEVER_FITS", "INVALID_ARGUMENT", "why"),
        ("UNKNOWN_ADAPTER", "NOT_FOUND", "why"),
        ("QUEUE_FULL", "RESOURCE_EXHAUSTED", "why"),
        ("SLO_UNATTAINABLE", "RESOURCE_EXHAUSTED", "SLO_UNATTAINABLE: why"),
        ("RANK_OVER_LIMIT", "FAILED_PRECONDITION", "why"),
        ("NO_WORKER", "UNAVAILABLE", "why"),
        ("ADAPTER_LOAD", "UNAVAILABLE", "why"),
        ("QUOTA_EXCEEDED", "RESOURCE_EXHAUSTED", "why"),
        ("WORKERS_LOST", "INTERNAL", "why"),
        ("INTERNAL", "INTERNAL", "internal error; the router's log has more"),
        ("UNSPECIFIED", "INTERNAL", "internal error; the router's log has more"),
    ],
)
async def test_a_refusal_becomes_its_status(start_router: StartRouter, reason: str, code: str, details: str) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate()
    route.refuse((await next_submit(route)).handle, Reason.Value(f"REFUSAL_REASON_{reason}"), "why")
    error = await failure(call)
    assert (error.code().name, error.details()) == (code, details)
    await router.until_empty()
    assert route.cancelled == []


async def test_every_refusal_reason_has_a_test() -> None:
    tested = 13  # those above, and DRAINING below
    assert len(Reason.values()) == tested


async def test_the_log_says_which_scheduler_has_more_of_an_internal_error(
    start_router: StartRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router = await start_router()
    route = await router.route()
    for request_id in ("one", "another"):
        call = router.generate(request_id=request_id)
        route.refuse((await next_submit(route)).handle, Reason.REFUSAL_REASON_INTERNAL, "the scheduler's log says more")
        await failure(call)
    captured = capsys.readouterr()
    (line,) = (line for line in (captured.out + captured.err).splitlines() if "request_failed" in line)  # the first
    for part in ("one", "the scheduler's log says more", router.schedulers[0].address):
        assert part in line


async def test_a_refusal_after_tokens_ends_the_stream(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate()
    handle = (await next_submit(route)).handle
    route.send([(handle, 3)])
    assert list((await call.read()).token_ids) == [3]
    route.refuse(handle, Reason.REFUSAL_REASON_NO_WORKER, "no worker for 30 s")
    assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_broken_stream_is_resumed_with_the_tokens_received(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    sampling = types_pb2.SamplingParams(max_new_tokens=6)
    call = router.generate(" about above", seed=11, priority=2, sampling=sampling)
    first = await next_submit(route)
    route.send([(first.handle, 3)])
    route.send([(first.handle, 4)])
    await router.until_written(2)
    route.break_off()
    again = await router.route()
    second = await next_submit(again)
    assert from_u32(second.produced_token_ids_u32) == [3, 4]
    assert (first.resumed, second.resumed) == (False, True)
    assert second.prompt_token_ids_u32 == first.prompt_token_ids_u32
    assert second.sampling == first.sampling
    assert second.request_id == first.request_id
    assert (first.priority, second.priority) == (2, 2)
    again.send([(second.handle, 5)])
    again.send([(second.handle, 6)], [(second.handle, LENGTH)])
    token_ids, text, _ = await everything(call)
    assert token_ids == [3, 4, 5, 6]
    assert text == " abc able about above"
    await router.until_empty()
    assert router.sample("lorrery_router_resumed_total") == 1


@pytest.mark.parametrize(
    ("token_ids", "ignore_eos", "reason"),
    [
        ([3, 4, 5], True, types_pb2.FINISH_REASON_LENGTH),
        ([3, 2], False, types_pb2.FINISH_REASON_EOS),
        ([3, 4, 2], False, types_pb2.FINISH_REASON_EOS),
    ],
)
async def test_a_broken_stream_whose_tokens_are_all_here_ends_without_its_scheduler(
    token_ids: list[int], ignore_eos: bool, reason: int, start_router: StartRouter
) -> None:
    router = await start_router()
    route = await router.route()
    sampling = types_pb2.SamplingParams(max_new_tokens=3, ignore_eos=ignore_eos)
    call = router.generate(" about above", seed=11, sampling=sampling)
    first = await next_submit(route)
    for token_id in token_ids:
        route.send([(first.handle, token_id)])
    await router.until_written(len(token_ids))
    route.break_off()  # before it has said that this is the end, as under batching that ends whole batches
    received, _, finish = await everything(call)
    assert received == token_ids
    assert finish.reason == reason
    assert finish.usage.completion_tokens == len(token_ids)
    await router.until_empty()
    assert (await router.route()).num_submits == 0


async def test_many_streams_survive_many_breaks(start_router: StartRouter) -> None:
    router = await start_router()
    num_streams, num_lives, per_life = 20, 4, 5
    calls = [router.generate(request_id=str(index)) for index in range(num_streams)]
    produced: dict[str, list[int]] = {str(index): [] for index in range(num_streams)}
    for life in range(num_lives):
        route = await router.route()
        submits = [await next_submit(route) for _ in calls]
        for submit in submits:
            assert from_u32(submit.produced_token_ids_u32) == produced[submit.request_id]
        for _ in range(per_life):
            for submit in submits:
                produced[submit.request_id].append(3 + len(produced[submit.request_id]))
            route.send([(submit.handle, produced[submit.request_id][-1]) for submit in submits])
        await router.until_written(num_streams * per_life * (life + 1))
        if life < num_lives - 1:
            route.break_off()
        else:
            route.send(finished=[(submit.handle, LENGTH) for submit in submits])
    for call in calls:
        assert (await everything(call))[0] == list(range(3, 3 + num_lives * per_life))
    await router.until_empty()


async def test_a_scheduler_process_that_restarts_is_found_again(start_router: StartRouter) -> None:
    router = await start_router()
    scheduler = router.schedulers[0]
    route = await router.route()
    call = router.generate()
    first = await next_submit(route)
    route.send([(first.handle, 3)])
    assert list((await call.read()).token_ids) == [3]
    await scheduler.stop()
    await router.until(lambda: router.sample("lorrery_router_waiting_for_shard_requests") == 1)
    assert router.sample("lorrery_router_shard_connected", shard=scheduler.address) == 0
    await scheduler.start(int(scheduler.address.rpartition(":")[2]))
    again = await router.route()
    second = await next_submit(again)
    assert from_u32(second.produced_token_ids_u32) == [3]
    again.send([(second.handle, 4)], [(second.handle, LENGTH)])
    assert (await everything(call))[0] == [4]
    await router.until_empty()


async def test_a_cancel_while_the_shard_is_away_leaves_nothing(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate()
    await next_submit(route)
    await router.schedulers[0].stop()
    await router.until(lambda: router.sample("lorrery_router_waiting_for_shard_requests") == 1)
    call.cancel()
    await router.until_empty()


async def test_requests_wait_for_the_first_connection(start_router: StartRouter) -> None:
    router = await start_router(up=False)
    call = router.generate()
    await router.until(lambda: router.sample("lorrery_router_waiting_for_shard_requests") == 1)
    assert not router.ready.is_set()
    await router.schedulers[0].start(int(router.schedulers[0].address.rpartition(":")[2]))
    route = await router.route()
    submit = await next_submit(route)
    route.send([(submit.handle, 3)], [(submit.handle, LENGTH)])
    assert (await everything(call))[0] == [3]
    assert router.ready.is_set()


async def test_without_a_shard_for_the_timeout_a_request_is_unavailable(start_router: StartRouter) -> None:
    router = await start_router(up=False, resume_timeout_seconds=0.05)
    error = await failure(router.generate())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "no scheduler for 0.05 s (resume_timeout_seconds)" in error.details()
    await router.until_empty()


async def test_once_no_scheduler_is_to_come_no_request_waits_for_one_until_one_connects(
    start_router: StartRouter,
) -> None:
    router = await start_router()
    route = await router.route()
    running = router.generate()
    await next_submit(route)
    ended = router.generate()
    handle = (await next_submit(route)).handle
    signal.raise_signal(NO_SCHEDULER_TO_COME)
    route.send([(handle, 4)], [(handle, LENGTH)])
    assert (await everything(ended))[0] == [4], "while the scheduler lives it answers"
    await router.schedulers[0].stop()
    for call in (running, router.generate()):
        error = await failure(call)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "none is to come" in error.details()
    await router.until_empty()
    await router.schedulers[0].start(int(router.schedulers[0].address.rpartition(":")[2]))
    again = await router.route()
    await router.until_connected()
    call = router.generate()
    submit = await next_submit(again)
    again.send([(submit.handle, 5)], [(submit.handle, LENGTH)])
    assert (await everything(call))[0] == [5]


async def test_a_draining_shard_gets_no_new_requests_but_finishes_its_own(start_router: StartRouter) -> None:
    router = await start_router(2)
    routes = [await router.route(index) for index in range(2)]
    await router.until_connected()
    running = router.generate(adapter_id="lora-0")
    await router.until(lambda: any(route.num_submits for route in routes))
    draining, other = sorted(routes, key=lambda route: -route.num_submits)
    submit = await next_submit(draining)
    draining.say_draining()
    # The frame behind tells that the router has read the one before.
    draining.send([(submit.handle, 3)])
    assert list((await running.read()).token_ids) == [3]
    fresh = router.generate(adapter_id="lora-0")
    moved = await next_submit(other)
    other.send([(moved.handle, 4)], [(moved.handle, LENGTH)])
    assert (await everything(fresh))[0] == [4]
    draining.send([(submit.handle, 5)], [(submit.handle, LENGTH)])
    assert (await everything(running))[0] == [5]
    assert draining.num_submits == 1


async def test_a_shard_that_was_draining_accepts_requests_when_it_is_back(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate()
    handle = (await next_submit(route)).handle
    route.say_draining()
    route.send([(handle, 3)], [(handle, LENGTH)])
    assert (await everything(call))[0] == [3]
    route.break_off()
    again = await router.route()
    # Only now: a request that waits for the shard goes there as it connects.
    await router.until_connected()
    call = router.generate()
    submit = await next_submit(again)
    again.send([(submit.handle, 4)], [(submit.handle, LENGTH)])
    assert (await everything(call))[0] == [4]


async def test_a_request_refused_by_a_draining_shard_goes_elsewhere(start_router: StartRouter) -> None:
    router = await start_router(2)
    routes = [await router.route(index) for index in range(2)]
    await router.until_connected()
    call = router.generate()
    await router.until(lambda: any(route.num_submits for route in routes))
    draining, other = sorted(routes, key=lambda route: -route.num_submits)
    draining.refuse((await next_submit(draining)).handle, Reason.REFUSAL_REASON_DRAINING)
    submit = await next_submit(other)
    other.send([(submit.handle, 3)], [(submit.handle, LENGTH)])
    assert (await everything(call))[0] == [3]


async def test_a_request_refused_by_the_only_shard_for_draining_is_unavailable_in_the_end(
    start_router: StartRouter,
) -> None:
    router = await start_router(resume_timeout_seconds=0.05)
    route = await router.route()
    call = router.generate()
    route.refuse((await next_submit(route)).handle, Reason.REFUSAL_REASON_DRAINING, "draining")
    assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("together", ["adapter", "outputs of one request"])
async def test_what_belongs_together_stays_on_one_shard_and_the_rest_spreads(
    start_router: StartRouter, together: str
) -> None:
    router = await start_router(2)
    routes = [await router.route(index) for index in range(2)]
    await router.until_connected()

    def fields(index: int) -> dict[str, Any]:
        name = f"lora-{index % 20}"
        if together == "adapter":
            return {"adapter_id": name}
        return {"request_id": str(index), "group": types_pb2.OutputGroup(id=name, num_outputs=3)}

    calls = [router.generate(**fields(index)) for index in range(60)]
    await router.until(lambda: sum(route.num_submits for route in routes) == 60)
    submits = [[route.submits.get_nowait() for _ in range(route.num_submits)] for route in routes]
    served = [{submit.adapter_id or submit.group.id for submit in some} for some in submits]
    assert not served[0] & served[1]
    assert all(served)
    for call in calls:
        call.cancel()
    await router.until_empty()


async def test_requests_for_the_base_model_spread(start_router: StartRouter) -> None:
    router = await start_router(2)
    routes = [await router.route(index) for index in range(2)]
    await router.until_connected()
    calls = [router.generate() for _ in range(60)]
    await router.until(lambda: sum(route.num_submits for route in routes) == 60)
    # 60 tosses of a coin show one side less than ten times once in 30 million runs.
    assert min(route.num_submits for route in routes) >= 10
    for call in calls:
        call.cancel()
    await router.until_empty()


async def test_the_streams_of_a_lost_shard_go_on_at_another(start_router: StartRouter) -> None:
    router = await start_router(2)
    routes = [await router.route(index) for index in range(2)]
    await router.until_connected()
    call = router.generate()
    await router.until(lambda: any(route.num_submits for route in routes))
    lost, other = sorted(routes, key=lambda route: -route.num_submits)
    handle = (await next_submit(lost)).handle
    lost.send([(handle, 3)])
    await router.until_written(1)
    lost.break_off()
    submit = await next_submit(other)
    assert from_u32(submit.produced_token_ids_u32) == [3]
    other.send([(submit.handle, 4)], [(submit.handle, LENGTH)])
    assert (await everything(call))[0] == [3, 4]


async def test_a_stream_that_runs_out_of_handles_begins_anew(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorrery.router.session._MAX_HANDLE", 2)
    router = await start_router()
    route = await router.route()
    calls = [router.generate() for _ in range(2)]
    assert sorted([(await next_submit(route)).handle for _ in calls]) == [1, 2]
    route.send([(1, 3), (2, 3)], [(2, LENGTH)])
    await router.until(lambda: router.sample("lorrery_router_in_flight_requests") == 1)
    calls.append(router.generate())
    again = await router.route()
    submits = [await next_submit(again) for _ in range(2)]
    assert [from_u32(submit.produced_token_ids_u32) for submit in submits] == [[3], []]
    again.send([(submit.handle, 4) for submit in submits], [(submit.handle, LENGTH) for submit in submits])
    assert sorted([(await everything(call))[0] for call in calls]) == [[3], [3, 4], [4]]


async def test_a_frame_that_breaks_the_protocol_is_a_lost_stream(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate()
    await next_submit(route)
    route.send_raw(scheduler_pb2.Tokens(handles_u32=b"\1\0\0\0", token_ids_u32=b""))
    again = await router.route()
    submit = await next_submit(again)
    again.send([(submit.handle, 3)], [(submit.handle, LENGTH)])
    assert (await everything(call))[0] == [3]


async def test_status_shows_every_shard(start_router: StartRouter) -> None:
    router = await start_router(2)
    await router.until_connected()
    await router.schedulers[1].stop()
    await router.until(lambda: not router.sample("lorrery_router_shard_connected", shard=router.schedulers[1].address))
    status = await router.stub.GetClusterStatus(router_pb2.GetClusterStatusRequest(), timeout=TIMEOUT_SECONDS)
    up, down = status.shards
    assert (up.address, up.connected, up.model, up.num_unplaced) == (
        router.schedulers[0].address,
        True,
        "Llama-2-7B",
        3,
    )
    assert (up.max_req_input_len, up.max_req_total_len, up.workers[0].num_running) == (100, 200, 2)
    assert (down.address, down.connected, len(down.workers)) == (router.schedulers[1].address, False, 0)


async def test_adapter_calls_without_any_shard_are_unavailable(start_router: StartRouter) -> None:
    router = await start_router(up=False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.stub.ListAdapters(router_pb2.ListAdaptersRequest(), timeout=TIMEOUT_SECONDS)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    status = await router.stub.GetClusterStatus(router_pb2.GetClusterStatusRequest(), timeout=TIMEOUT_SECONDS)
    assert [shard.connected for shard in status.shards] == [False]
    await asyncio.wait_for(router.channel.channel_ready(), TIMEOUT_SECONDS)


async def test_status_is_asked_of_the_shards_once_a_second_at_most(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router()
    await router.until_connected()
    monkeypatch.setattr("lorrery.router.adapters.STATUS_SECONDS", 3600.0)
    request = router_pb2.GetClusterStatusRequest()
    first, *others = await asyncio.gather(
        *(router.stub.GetClusterStatus(request, timeout=TIMEOUT_SECONDS) for _ in range(20))
    )
    assert len(first.shards) == 1
    assert all(other == first for other in others)
    monkeypatch.setattr("lorrery.router.adapters.STATUS_SECONDS", 0.0)
    assert await router.stub.GetClusterStatus(request, timeout=TIMEOUT_SECONDS) == first
    assert router.schedulers[0].num_statuses == 2


async def test_a_scheduler_that_does_not_answer_the_hello_is_dialled_again(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorrery.router.shard.HELLO_SECONDS", 0.2)
    router = await start_router(up=False)
    (silent,) = router.schedulers
    silent.may_answer.clear()
    await silent.start(int(silent.address.rpartition(":")[2]))
    await router.until(lambda: silent.num_hellos >= 3)
    silent.may_answer.set()
    await router.until_connected()


async def test_a_scheduler_that_cannot_be_reached_is_told_with_the_reason(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorrery.router.shard.DIAL_SECONDS", 0.01)
    monkeypatch.setattr("lorrery.router.shard.WARN_AFTER_SECONDS", 3.0)
    monkeypatch.setattr("lorrery.router.shard.WARN_EVERY_SECONDS", 1000.0)
    with capture_logs() as events:
        router = await start_router(up=False)

        def told() -> list[tuple[str, str, str]]:
            found = [event for event in events if event["event"] == "shard_not_connected"]
            return [(event["log_level"], event["shard"], event["reason"]) for event in found]

        await router.until(lambda: len(told()) == 2)
        (scheduler,) = router.schedulers
        await scheduler.start(int(scheduler.address.rpartition(":")[2]))
        await router.until_connected()
    assert [(level, shard) for level, shard, _ in told()] == [
        ("info", scheduler.address),
        ("warning", scheduler.address),
    ]
    assert all("Connection refused" in reason for _, _, reason in told())
