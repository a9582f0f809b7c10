"""A clock that stands while this process does."""

import asyncio
import time

import pytest

from lorrery.service.awake import AwakeClock

STOP_SECONDS = 0.5


async def test_a_stop_counts_for_two_ticks_at_most() -> None:
    awake = AwakeClock(tick_seconds=0.02)
    before = awake.now()
    time.sleep(STOP_SECONDS)  # noqa: ASYNC251  holds the loop, as SIGSTOP would
    assert awake.now() - before <= 0.02
    await asyncio.sleep(0)
    assert awake.now() - before <= 0.06


async def test_a_wait_goes_on_after_a_stop_for_as_long_as_was_left() -> None:
    awake = AwakeClock(tick_seconds=0.02)
    started, woken = time.monotonic(), awake.now() + 0.2
    asyncio.get_running_loop().call_later(0.01, time.sleep, STOP_SECONDS)
    await awake.sleep_until(woken)
    assert time.monotonic() - started > STOP_SECONDS + 0.1
    assert awake.now() >= woken


async def test_what_is_there_after_a_stop_is_in_time() -> None:
    awake = AwakeClock(tick_seconds=0.02)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()
    loop.call_later(0.01, time.sleep, STOP_SECONDS)
    loop.call_later(0.02, loop.call_soon, loop.call_soon, future.set_result, "hello")
    assert await awake.within(0.2, future) == "hello"


async def test_what_does_not_come_is_cancelled() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await AwakeClock().within(0.05, future)
    assert future.cancelled()


async def test_after_a_stop_it_is_steady_again_only_with_time() -> None:
    awake = AwakeClock(tick_seconds=0.02)
    assert awake.steady_seconds() > 1e9  # no stop has been seen
    await asyncio.sleep(0.05)
    time.sleep(STOP_SECONDS)  # noqa: ASYNC251  holds the loop, as SIGSTOP would
    assert awake.steady_seconds() == 0
    await asyncio.sleep(0.05)
    assert 0 <= awake.steady_seconds() < STOP_SECONDS
