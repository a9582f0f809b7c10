"""Slots and fan-out by themselves: what cannot be brought about from outside."""

import asyncio
from array import array

import pytest
from prometheus_client import CollectorRegistry

from lorrery.chassis.errors import Internal, Unavailable
from lorrery.router.metrics import RouterMetrics
from lorrery.router.request import Finish, FinishReason, Request, Usage
from lorrery.router.sampling import SamplingParams
from lorrery.router.streams import Fanout, Slot
from lorrery.router.wire import TokensFrame
from lorrery.v1 import router_pb2

REQUEST = Request("r", "", "", b"\1\0\0\0", SamplingParams(), (), 1)
FINISH = Finish(FinishReason.LENGTH, Usage(1, 1))


def echo(token_ids: list[int], finish: Finish | None, _time_scale: float) -> tuple[router_pb2.GenerateResponse, bool]:
    return router_pb2.GenerateResponse(token_ids=token_ids), finish is not None


def broken(token_ids: list[int], finish: Finish | None, _time_scale: float) -> tuple[router_pb2.GenerateResponse, bool]:
    raise ValueError(f"{token_ids} {finish}")


@pytest.fixture
async def fanout() -> Fanout:
    metrics = RouterMetrics(CollectorRegistry())
    return Fanout(1.0, max_pending_tokens=8, max_gap_seconds=0.01, metrics=metrics, on_slow_reader=lambda _: None)


def frame(*tokens: tuple[int, int], finished: tuple[int, ...] = ()) -> TokensFrame:
    handles, token_ids = array("I", [handle for handle, _ in tokens]), array("I", [token_id for _, token_id in tokens])
    return TokensFrame(10**12, 10**10, handles, token_ids, [(handle, FINISH) for handle in finished])


async def test_a_message_that_cannot_be_made_fails_its_own_request_only(fanout: Fanout) -> None:
    slots = [Slot(REQUEST, broken), Slot(REQUEST, echo)]
    for handle, slot in enumerate(slots):
        fanout.add(handle, slot)
    waiting = [asyncio.create_task(slot.next_message()) for slot in slots]
    await asyncio.wait(waiting, timeout=0)
    fanout.deliver(frame((0, 5), (1, 6)))
    with pytest.raises(Internal):
        await waiting[0]
    assert list((await waiting[1]).token_ids) == [6]


async def test_an_error_wakes_the_handler(fanout: Fanout) -> None:
    slot = Slot(REQUEST, echo)
    fanout.add(1, slot)
    waiting = asyncio.create_task(slot.next_message())
    await asyncio.wait([waiting], timeout=0)
    slot.fail(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await waiting


async def test_a_finish_is_not_undone_by_a_later_error(fanout: Fanout) -> None:
    slot = Slot(REQUEST, echo)
    fanout.add(1, slot)
    fanout.deliver(frame((1, 5), finished=(1,)))
    slot.fail(Unavailable("gone"))
    assert list((await slot.next_message()).token_ids) == [5]
    assert slot.over
    assert not fanout.slots


async def test_a_cancelled_handler_does_not_disturb_its_frame(fanout: Fanout) -> None:
    slots = [Slot(REQUEST, echo), Slot(REQUEST, echo)]
    for handle, slot in enumerate(slots):
        fanout.add(handle, slot)
    waiting = [asyncio.create_task(slot.next_message()) for slot in slots]
    await asyncio.wait(waiting, timeout=0)
    waiting[0].cancel()
    fanout.deliver(frame((0, 5), (1, 6)))
    assert list((await waiting[1]).token_ids) == [6]
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def test_closing_gives_back_every_slot_and_what_was_held(fanout: Fanout) -> None:
    slots = [Slot(REQUEST, echo), Slot(REQUEST, echo)]
    for handle, slot in enumerate(slots):
        fanout.add(handle, slot)
    fanout.deliver(frame((0, 5)))
    assert fanout.close() == slots
    assert [slot.fanout for slot in slots] == [None, None]
    assert list((await slots[0].next_message()).token_ids) == [5]
