"""From frames to messages: order, coalescing, slow readers."""

import asyncio

import grpc
import pytest

from lorrery.router import generate
from lorrery.v1 import router_pb2, scheduler_pb2, types_pb2
from tests.cluster.client import error_info
from tests.cluster.harness import wait_until
from tests.router.conftest import StartRouter, everything, failure, next_submit

LENGTH = types_pb2.FINISH_REASON_LENGTH


async def test_a_router_that_keeps_up_writes_each_token_at_once(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate()
    handle = (await next_submit(route)).handle
    for token_id in range(3, 23):
        route.send([(handle, token_id)])
        assert list((await call.read()).token_ids) == [token_id]
    route.send([(handle, 23)], [(handle, LENGTH)])
    last = await call.read()
    assert (list(last.token_ids), last.finish.reason) == ([23], LENGTH)
    assert await call.read() is grpc.aio.EOF
    assert router.sample("lorrery_router_tokens_per_message_tokens_count") == 21
    assert router.sample("lorrery_router_time_to_first_token_seconds_count") == 1
    assert router.sample("lorrery_router_inter_token_latency_seconds_count") == 20
    assert router.sample("lorrery_router_time_per_output_token_seconds_count") == 1


async def test_tokens_that_come_together_leave_together(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate()
    handle = (await next_submit(route)).handle
    route.send([(handle, 3), (handle, 4), (handle, 5)], [(handle, LENGTH)])
    only = await call.read()
    assert (list(only.token_ids), only.text, only.finish.reason) == ([3, 4, 5], " abc able about", LENGTH)
    assert await call.read() is grpc.aio.EOF


async def test_a_late_router_coalesces_and_loses_nothing(start_router: StartRouter) -> None:
    router = await start_router(max_flush_gap_seconds=0.05)
    route = await router.route()
    num_streams, num_tokens = 8, 60
    calls = [router.generate(request_id=str(index)) for index in range(num_streams)]
    handle_of = {submit.request_id: submit.handle for submit in [await next_submit(route) for _ in calls]}
    handles = [handle_of[str(index)] for index in range(num_streams)]
    for step in range(num_tokens):
        late_seconds = 0.0 if step == 0 else 1.0
        last = step == num_tokens - 1
        finished = [(handle, LENGTH) for handle in handles] if last else []
        route.send([(handle, 3 + handle * 100 + step) for handle in handles], finished, late_seconds=late_seconds)
    for handle, call in zip(handles, calls, strict=True):
        token_ids, text, finish = await everything(call)
        assert token_ids == [3 + handle * 100 + step for step in range(num_tokens)]
        assert text.count(" ") == num_tokens
        assert finish.reason == LENGTH
    await router.until_empty()
    assert router.sample("lorrery_router_output_tokens_total") == num_streams * num_tokens
    assert router.sample("lorrery_router_messages_total") < num_streams * num_tokens / 2


async def test_tokens_held_back_leave_even_if_no_frame_follows(start_router: StartRouter) -> None:
    router = await start_router(max_flush_gap_seconds=0.02)
    route = await router.route()
    call = router.generate()
    handle = (await next_submit(route)).handle
    route.send([(handle, 3)])
    assert list((await call.read()).token_ids) == [3]
    route.send([(handle, 4), (handle, 5)], late_seconds=1.0)
    assert list((await call.read()).token_ids) == [4, 5]
    call.cancel()
    await router.until_empty()


async def test_first_and_last_token_leave_at_once_however_late_the_router_is(start_router: StartRouter) -> None:
    router = await start_router(max_flush_gap_seconds=3600.0)
    route = await router.route()
    other = router.generate()
    other_handle = (await next_submit(route)).handle
    route.send([(other_handle, 3)])
    call = router.generate()
    handle = (await next_submit(route)).handle
    route.send([(handle, 3)], late_seconds=4.0)
    assert list((await call.read()).token_ids) == [3]
    route.send([(handle, 4)], [(handle, LENGTH)], late_seconds=4.0)
    last = await call.read()
    assert (list(last.token_ids), last.finish.reason) == ([4], LENGTH)
    other.cancel()
    await router.until_empty()


async def test_a_slow_reader_is_cut_and_the_others_go_on(start_router: StartRouter) -> None:
    limit = 64
    router = await start_router(max_pending_tokens=limit)
    route = await router.route()
    slow = router.generate()
    handles = [(await next_submit(route)).handle]
    quick = router.generate()
    handles.append((await next_submit(route)).handle)
    sent = 0
    while not route.cancelled:
        route.send([(handle, 3) for handle in handles])
        sent += 1
        assert list((await quick.read()).token_ids) == [3]
    assert route.cancelled == [handles[0]]
    error = await failure(slow)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == f"the reader left more than {limit} tokens waiting; max_pending_tokens is {limit}"
    route.send(finished=[(handles[1], LENGTH)])
    assert (await quick.read()).finish.reason == LENGTH
    await router.until_empty()
    assert limit < sent < 2000
    assert router.sample("lorrery_router_slow_readers_total") == 1
    assert router.sample("lorrery_router_requests_total", outcome="overloaded") == 1


async def test_a_slow_reader_that_leaves_takes_its_handler_along(start_router: StartRouter) -> None:
    router = await start_router(max_pending_tokens=64)
    route = await router.route()
    slow = router.generate()
    handle = (await next_submit(route)).handle
    while not route.cancelled:
        route.send([(handle, 3)] * 8)
        await router.stub_round_trip()
    slow.cancel()
    await router.until_empty()


async def test_a_slow_reader_holds_no_handler_and_hears_why_when_it_reads_again(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorrery.router.generate.FAREWELL_SECONDS", 0.05)
    router = await start_router(max_pending_tokens=64)
    route = await router.route()
    slow = router.generate()
    handle = (await next_submit(route)).handle
    while not route.cancelled:
        route.send([(handle, 3)] * 8)
        await router.stub_round_trip()
    await router.until_empty()
    assert (await failure(slow)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("finished", [False, True])
async def test_under_default_settings_a_reader_that_stops_is_cut_in_time_and_holds_no_handler(
    start_router: StartRouter, finished: bool
) -> None:
    router = await start_router()
    route = await router.route()
    stopped = router.generate(timeout=60)
    handle = (await next_submit(route)).handle
    quick = router.generate(timeout=60)
    other = (await next_submit(route)).handle
    for _ in range(500):  # more than the window takes, and less than max_pending_tokens
        route.send([(handle, 3)])
    if finished:
        route.send(finished=[(handle, LENGTH)])
    route.send([(other, 3)])
    assert list((await quick.read()).token_ids) == [3]
    await wait_until(lambda: router.sample("lorrery_router_open_handlers") == 1)
    assert router.sample("lorrery_router_slow_readers_total") == 1
    assert router.sample("lorrery_router_requests_total", outcome="overloaded") == 1
    if not finished:
        await wait_until(lambda: bool(route.cancelled))  # the scheduler hears of it after the handler has gone
    assert route.cancelled == ([] if finished else [handle])
    route.send([(other, 4)], [(other, LENGTH)])
    assert list((await quick.read()).token_ids) == [4]
    error = await failure(stopped)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "the reader took nothing for 10 s; reader_timeout_seconds is 10"
    assert error_info(error)[0] == "SLOW_READER"


async def test_a_reader_that_takes_not_even_the_first_message_hears_why(start_router: StartRouter) -> None:
    router = await start_router(reader_timeout_seconds=0.4)
    route = await router.route()
    stuck = router.generate(timeout=60)
    handle = (await next_submit(route)).handle
    route.send([(handle, 3)] * 60_000)  # in one message, of more than the window takes
    await router.until(lambda: router.sample("lorrery_router_slow_readers_total") == 1)
    await router.until_empty()
    error = await failure(stuck)
    assert (error.code(), error_info(error)[0]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")


async def test_tokens_for_nobody_are_dropped(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate()
    handle = (await next_submit(route)).handle
    route.send([(handle + 1, 9), (handle, 3), (0, 9)], [(handle + 7, LENGTH)])
    route.send([(handle, 4)], [(handle, LENGTH)])
    route.send([(handle, 5)])
    assert (await everything(call))[0] == [3, 4]
    await router.until(lambda: router.sample("lorrery_router_dropped_tokens_total") == 3)


async def test_a_stop_string_that_only_the_text_shows_cancels_upstream(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate(" about abc", sampling=types_pb2.SamplingParams(stop_sequences=["c ab", " zoo"]))
    submit = await next_submit(route)
    assert submit.sampling.stop_sequences_u32[1] == (1907).to_bytes(4, "little")
    for token_id in (4, 3, 5):
        route.send([(submit.handle, token_id)])
    await router.until(lambda: route.cancelled == [submit.handle])
    # The step that ran meanwhile, then the scheduler's word on what the request has consumed.
    route.send([(submit.handle, 6)])
    usage = types_pb2.Usage(
        prompt_tokens=3, completion_tokens=4, cached_tokens=2, queue_seconds=0.5, worker_id="w0", num_requeues=1
    )
    route.send(finished=[(submit.handle, types_pb2.FINISH_REASON_ABORTED)], usage=usage)
    token_ids, text, finish = await everything(call)
    assert (token_ids, text) == ([4, 3, 5], " able ab")
    usage.completion_tokens = 3
    assert finish == router_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP, usage=usage, stop_sequence="c ab")
    assert await call.code() == grpc.StatusCode.OK
    await router.until_empty()
    assert router.sample("lorrery_router_requests_total", outcome="ok") == 1
    assert router.sample("lorrery_router_time_per_output_token_seconds_count") == 1


async def test_a_stopped_stream_whose_scheduler_says_nothing_ends_with_what_is_known(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "LAST_WORD_SECONDS", 0.01)
    router = await start_router()
    route = await router.route()
    call = router.generate(" about abc", sampling=types_pb2.SamplingParams(stop_sequences=["c ab"]))
    handle = (await next_submit(route)).handle
    route.send([(handle, 3), (handle, 5)])
    token_ids, text, finish = await everything(call)
    assert (token_ids, text, finish.reason) == ([3, 5], " ab", types_pb2.FINISH_REASON_STOP)
    assert finish.usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=2)
    # What comes too late is for nobody.
    route.send([(handle, 6)], [(handle, types_pb2.FINISH_REASON_ABORTED)])
    await router.until(lambda: router.sample("lorrery_router_dropped_tokens_total") == 1)
    await router.until_empty()


@pytest.mark.parametrize("end", ["lost", "refused"])
async def test_a_stopped_stream_does_not_wait_for_a_scheduler_that_will_not_answer(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(generate, "LAST_WORD_SECONDS", 60.0)
    router = await start_router()
    route = await router.route()
    call = router.generate(" about abc", sampling=types_pb2.SamplingParams(stop_sequences=["c ab"]))
    handle = (await next_submit(route)).handle
    route.send([(handle, 3), (handle, 5)])
    await router.until(lambda: route.cancelled == [handle])
    if end == "lost":
        route.break_off()
    else:
        route.refuse(handle, scheduler_pb2.REFUSAL_REASON_SLO_UNATTAINABLE)
    assert (await everything(call))[2].usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=2)
    await router.until_empty()
    assert route.num_submits == 1


async def test_a_client_that_leaves_a_stopped_stream_leaves_nothing(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "LAST_WORD_SECONDS", 60.0)
    router = await start_router()
    route = await router.route()
    call = router.generate(" about abc", sampling=types_pb2.SamplingParams(stop_sequences=["c ab"]))
    handle = (await next_submit(route)).handle
    route.send([(handle, 3), (handle, 5)])
    await router.until(lambda: route.cancelled == [handle])
    call.cancel()
    await router.until_empty()
    assert route.cancelled == [handle]


async def test_times_are_counted_in_device_seconds(start_router: StartRouter) -> None:
    router = await start_router(time_scale=1000.0)
    route = await router.route()
    call = router.generate()
    handle = (await next_submit(route)).handle
    await asyncio.sleep(0.05)
    route.send([(handle, 3)])
    await call.read()
    await asyncio.sleep(0.05)
    route.send([(handle, 3)], [(handle, LENGTH)])
    await call.read()
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency"):
        assert 40e-6 < router.sample(f"lorrery_router_{name}_seconds_sum") < 0.01
