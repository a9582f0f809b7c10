"""Open requests and fan-out by themselves: what cannot be brought about from outside."""

import asyncio
from array import array

import pytest
from prometheus_client import CollectorRegistry

from lorrery.router.metrics import RouterMetrics
from lorrery.router.open_request import OpenRequest
from lorrery.router.request import Finish, Request, Usage
from lorrery.router.sampling import SamplingParams
from lorrery.router.session import Fanout
from lorrery.router.wire import TokensFrame
from lorrery.service.errors import Internal, Unavailable
from lorrery.v1 import router_pb2
from lorrery.vocabulary.endings import FinishReason

REQUEST = Request("r", "", "", b"\1\0\0\0", SamplingParams(), (), 1)
FINISH = Finish(FinishReason.LENGTH, Usage(1, 1))


def echo(
    token_ids: list[int], finish: Finish | None, _time_scale: float, _at: float | None
) -> tuple[router_pb2.GenerateResponse, bool]:
    return router_pb2.GenerateResponse(token_ids=token_ids), finish is not None


def broken(
    token_ids: list[int], finish: Finish | None, _time_scale: float, _at: float | None
) -> tuple[router_pb2.GenerateResponse, bool]:
    raise ValueError(f"{token_ids} {finish}")


@pytest.fixture
async def fanout() -> Fanout:
    metrics = RouterMetrics(CollectorRegistry())
    return Fanout(1.0, max_pending_tokens=8, max_gap_seconds=0.01, metrics=metrics, on_slow_reader=lambda _: None)


STEP_PS = 10**14
"""100 s, so that no delay of the machine makes a frame late."""


def frame(*tokens: tuple[int, int], finished: tuple[int, ...] = (), late_ps: int = 0) -> TokensFrame:
    handles, token_ids = array("I", [handle for handle, _ in tokens]), array("I", [token_id for _, token_id in tokens])
    finishes = [(handle, FINISH) for handle in finished]
    return TokensFrame(10**16 - late_ps, STEP_PS, handles, token_ids, finishes)


async def test_a_message_that_cannot_be_made_fails_its_own_request_only(fanout: Fanout) -> None:
    open_requests = [OpenRequest(REQUEST, broken), OpenRequest(REQUEST, echo)]
    for handle, open_request in enumerate(open_requests):
        fanout.add(handle, open_request)
    waiting = [asyncio.create_task(open_request.next_message()) for open_request in open_requests]
    await asyncio.wait(waiting, timeout=0)
    fanout.deliver(frame((0, 5), (1, 6)))
    with pytest.raises(Internal):
        await waiting[0]
    assert list((await waiting[1]).token_ids) == [6]


async def test_an_error_wakes_the_handler(fanout: Fanout) -> None:
    open_request = OpenRequest(REQUEST, echo)
    fanout.add(1, open_request)
    waiting = asyncio.create_task(open_request.next_message())
    await asyncio.wait([waiting], timeout=0)
    open_request.fail(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await waiting


async def test_a_finish_is_not_undone_by_a_later_error(fanout: Fanout) -> None:
    open_request = OpenRequest(REQUEST, echo)
    fanout.add(1, open_request)
    fanout.deliver(frame((1, 5), finished=(1,)))
    open_request.fail(Unavailable("gone"))
    assert list((await open_request.next_message()).token_ids) == [5]
    assert open_request.over
    assert not fanout.open_requests


async def test_a_cancelled_handler_does_not_disturb_its_frame(fanout: Fanout) -> None:
    open_requests = [OpenRequest(REQUEST, echo), OpenRequest(REQUEST, echo)]
    for handle, open_request in enumerate(open_requests):
        fanout.add(handle, open_request)
    waiting = [asyncio.create_task(open_request.next_message()) for open_request in open_requests]
    await asyncio.wait(waiting, timeout=0)
    waiting[0].cancel()
    fanout.deliver(frame((0, 5), (1, 6)))
    assert list((await waiting[1]).token_ids) == [6]
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def waiting_for(fanout: Fanout, open_request: OpenRequest) -> "asyncio.Task[router_pb2.GenerateResponse]":
    fanout.add(1, open_request)
    waiting = asyncio.create_task(open_request.next_message())
    await asyncio.wait([waiting], timeout=0)
    return waiting


async def test_what_needs_no_waiting_is_written_while_the_handler_sleeps_and_the_last_is_the_handlers(
    fanout: Fanout,
) -> None:
    written: list[int] = []

    def write_now(message: router_pb2.GenerateResponse) -> bool:
        written.extend(message.token_ids)
        return True

    waiting = await waiting_for(fanout, OpenRequest(REQUEST, echo, write_now))
    for token_id in (5, 6, 7):
        fanout.deliver(frame((1, token_id)))
    await asyncio.wait([waiting], timeout=0)
    assert written == [5, 6, 7]
    assert not waiting.done()
    fanout.deliver(frame((1, 8), finished=(1,)))
    assert list((await waiting).token_ids) == [8]
    assert written == [5, 6, 7]


async def test_what_cannot_be_written_at_once_is_the_handlers_and_what_follows_waits_behind_it(fanout: Fanout) -> None:
    tried: list[int] = []

    def write_now(message: router_pb2.GenerateResponse) -> bool:
        tried.extend(message.token_ids)
        return False

    open_request = OpenRequest(REQUEST, echo, write_now)
    waiting = await waiting_for(fanout, open_request)
    fanout.deliver(frame((1, 5)))
    fanout.deliver(frame((1, 6)))
    assert list((await waiting).token_ids) == [5]
    assert tried == [5]
    assert list((await open_request.next_message()).token_ids) == [6]


async def test_a_write_that_fails_ends_its_own_request_only(fanout: Fanout) -> None:
    def write_now(message: router_pb2.GenerateResponse) -> bool:
        raise OSError(f"no place for {message}")

    other = OpenRequest(REQUEST, echo)
    waiting = await waiting_for(fanout, OpenRequest(REQUEST, echo, write_now))
    fanout.add(2, other)
    fanout.deliver(frame((1, 5), (2, 6)))
    with pytest.raises(Internal, match="no place"):
        await waiting
    assert list((await other.next_message()).token_ids) == [6]


async def test_closing_gives_back_every_slot_and_what_was_held(fanout: Fanout) -> None:
    open_requests = [OpenRequest(REQUEST, echo), OpenRequest(REQUEST, echo)]
    for handle, open_request in enumerate(open_requests):
        fanout.add(handle, open_request)
    fanout.deliver(frame((0, 5)))
    assert fanout.close() == open_requests
    assert [open_request.fanout for open_request in open_requests] == [None, None]
    assert list((await open_requests[0].next_message()).token_ids) == [5]


@pytest.mark.parametrize(
    ("time_scale", "late_seconds", "gap_seconds"),
    [
        # A step is 100 s: a quarter of it is late, eight times the lateness is the gap, four steps are the most.
        (1.0, 24.0, None),
        (1.0, 26.0, 208.0),
        (1.0, 60.0, 400.0),
        # Lateness and gaps are wall time, of which a step takes `time_scale` as much.
        (0.1, 2.0, None),
        (0.1, 3.0, 24.0),
        (0.1, 60.0, 40.0),
        (10.0, 240.0, None),
        (10.0, 260.0, 2080.0),
        (10.0, 900.0, 3600.0),
    ],
)
async def test_tokens_of_a_late_frame_gather_for_a_gap_that_grows_with_its_lateness(
    monkeypatch: pytest.MonkeyPatch, time_scale: float, late_seconds: float, gap_seconds: float | None
) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    fanout = Fanout(
        time_scale, max_pending_tokens=8, max_gap_seconds=3600.0, metrics=metrics, on_slow_reader=lambda _: None
    )
    open_request = OpenRequest(REQUEST, echo)
    fanout.add(1, open_request)
    fanout.deliver(frame((1, 5)))
    assert list((await open_request.next_message()).token_ids) == [5]
    waiting = asyncio.create_task(open_request.next_message())
    await asyncio.wait([waiting], timeout=0)
    timers: list[float] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, _flush: timers.append(delay))
    fanout.deliver(frame((1, 6), late_ps=round(late_seconds / time_scale * 1e12)))
    monkeypatch.undo()
    assert timers == ([] if gap_seconds is None else [pytest.approx(gap_seconds, rel=0.01)])
    assert open_request.written == (2 if gap_seconds is None else 1)
    waiting.cancel()


async def test_the_first_token_leaves_with_its_frame_however_late_that_is(fanout: Fanout) -> None:
    fanout.deliver(frame())
    open_request = OpenRequest(REQUEST, echo)
    fanout.add(1, open_request)
    waiting = asyncio.create_task(open_request.next_message())
    await asyncio.wait([waiting], timeout=0)
    fanout.deliver(frame((1, 5), late_ps=9 * STEP_PS))
    assert open_request.written == 1
    fanout.deliver(frame((1, 6), late_ps=9 * STEP_PS))
    assert open_request.written == 1
    assert list((await waiting).token_ids) == [5]
    fanout.close()


async def test_a_first_token_that_came_before_its_handler_asks_does_not_wait_for_a_flush(fanout: Fanout) -> None:
    fanout.deliver(frame())
    open_request = OpenRequest(REQUEST, echo)
    fanout.add(1, open_request)
    fanout.deliver(frame((1, 5), late_ps=9 * STEP_PS))
    asking = asyncio.create_task(open_request.next_message())
    await asyncio.wait([asking], timeout=0)
    assert open_request.written == 1
    assert list((await asking).token_ids) == [5]
    fanout.close()


@pytest.mark.parametrize("num_written", [0, 5, 20])
async def test_a_reader_is_slow_with_more_tokens_pending_than_the_limit(fanout: Fanout, num_written: int) -> None:
    open_request = OpenRequest(REQUEST, echo)
    fanout.add(1, open_request)
    for _ in range(num_written):
        fanout.deliver(frame((1, 5)))
        await open_request.next_message()
    for _ in range(8):
        fanout.deliver(frame((1, 5)))
    assert open_request.fanout is fanout
    fanout.deliver(frame((1, 5)))
    assert open_request.fanout is None
