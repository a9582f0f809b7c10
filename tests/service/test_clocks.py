"""A clock that stands while this process does."""

import asyncio
import time

import pytest

from lorrery.service.clocks import DRIFT, DeviceClock, UptimeClock
from lorrery.vocabulary.units import PS_PER_SECOND


@pytest.fixture
def monotonic(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, as a list of one number that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_starts_at_zero_and_counts_device_picoseconds(monotonic: list[float]):
    clock = DeviceClock(time_scale=2.0)
    assert clock.now_ps() == 0
    monotonic[0] += 3.0
    assert clock.now_ps() == 1.5 * PS_PER_SECOND


def test_device_time_comes_when_it_says(monotonic: list[float]):
    clock = DeviceClock(time_scale=0.5)
    assert clock.to_monotonic(4 * PS_PER_SECOND) == 1002.0
    monotonic[0] = 1002.0
    assert clock.now_ps() == 4 * PS_PER_SECOND


def test_synced_clock_reads_what_it_was_told(monotonic: list[float]):
    clock = DeviceClock.synced(2.0, 7 * PS_PER_SECOND)
    assert clock.now_ps() == 7 * PS_PER_SECOND
    monotonic[0] += 2.0
    assert clock.now_ps() == 8 * PS_PER_SECOND


def test_least_transit_seen_wins(monotonic: list[float]):
    clock = DeviceClock.synced(1.0, 0)  # transit of the welcome: 50 ms, say
    monotonic[0] += 1.0
    clock.observe(round(1.04 * PS_PER_SECOND))  # this one took 10 ms only
    assert clock.now_ps() == pytest.approx(1.04 * PS_PER_SECOND)
    monotonic[0] += 1.0
    clock.observe(round(1.5 * PS_PER_SECOND))  # held up for half a second: says nothing
    assert clock.now_ps() == pytest.approx(2.04 * PS_PER_SECOND, abs=DRIFT * PS_PER_SECOND)


def test_clock_is_never_behind_the_latest_stamp(monotonic: list[float]):
    clock = DeviceClock.synced(1.0, 0)
    for stamp_seconds in (0.1, 0.5, 0.9):
        monotonic[0] += 0.01
        clock.observe(round(stamp_seconds * PS_PER_SECOND))
        assert clock.now_ps() >= round(stamp_seconds * PS_PER_SECOND) - 1000


def test_estimate_follows_a_clock_that_runs_slower(monotonic: list[float]):
    clock = DeviceClock.synced(1.0, 0)
    for second in range(1, 10_001):
        monotonic[0] = 1000.0 + second
        clock.observe(round(second * (1 - DRIFT / 2) * PS_PER_SECOND))
    error_seconds = clock.now_ps() / PS_PER_SECOND - 10_000 * (1 - DRIFT / 2)
    assert abs(error_seconds) < 1e-3


def test_an_answer_shows_a_clock_that_has_jumped_ahead_of_the_other(monotonic: list[float]):
    clock = DeviceClock.synced(2.0, 0)
    monotonic[0] += 20.0  # ten device seconds; the other's host stood still for the last five of them
    assert clock.now_ps() == 10 * PS_PER_SECOND
    asked_at = monotonic[0]
    monotonic[0] += 0.5
    assert clock.observe(5 * PS_PER_SECOND, asked_at) == pytest.approx(10.0, abs=0.01)
    assert clock.now_ps() == pytest.approx(5.25 * PS_PER_SECOND)


def test_an_answer_of_a_clock_that_has_not_jumped_changes_nothing(monotonic: list[float]):
    clock = DeviceClock.synced(1.0, 0)
    asked_at = monotonic[0] = 1100.0
    monotonic[0] += 3.0  # held up on its way, there or back
    for stamp_seconds in (100, 101.5, 103):
        assert clock.observe(round(stamp_seconds * PS_PER_SECOND), asked_at) == 0
        assert clock.now_ps() == pytest.approx(103 * PS_PER_SECOND, abs=103 * DRIFT * PS_PER_SECOND)


@pytest.mark.parametrize("time_scale", [0.0, -1.0, float("nan")])
def test_impossible_time_scale_is_refused(time_scale: float):
    with pytest.raises(ValueError, match="time_scale"):
        DeviceClock(time_scale)


STOP_SECONDS = 0.5


async def test_a_stop_counts_for_two_ticks_at_most() -> None:
    uptime = UptimeClock(tick_seconds=0.02)
    before = uptime.now()
    time.sleep(STOP_SECONDS)  # noqa: ASYNC251  holds the loop, as SIGSTOP would
    assert uptime.now() - before <= 0.02
    await asyncio.sleep(0)
    assert uptime.now() - before <= 0.06


async def test_a_wait_goes_on_after_a_stop_for_as_long_as_was_left() -> None:
    uptime = UptimeClock(tick_seconds=0.02)
    started, woken = time.monotonic(), uptime.now() + 0.2
    asyncio.get_running_loop().call_later(0.01, time.sleep, STOP_SECONDS)
    await uptime.sleep_until(woken)
    assert time.monotonic() - started > STOP_SECONDS + 0.1
    assert uptime.now() >= woken


async def test_what_is_there_after_a_stop_is_in_time() -> None:
    uptime = UptimeClock(tick_seconds=0.02)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()
    loop.call_later(0.01, time.sleep, STOP_SECONDS)
    loop.call_later(0.02, loop.call_soon, loop.call_soon, future.set_result, "hello")
    assert await uptime.within(0.2, future) == "hello"


async def test_what_does_not_come_is_cancelled() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await UptimeClock().within(0.05, future)
    assert future.cancelled()


async def test_after_a_stop_it_is_steady_again_only_with_time() -> None:
    uptime = UptimeClock(tick_seconds=0.02)
    assert uptime.steady_seconds() > 1e9  # no stop has been seen
    await asyncio.sleep(0.05)
    time.sleep(STOP_SECONDS)  # noqa: ASYNC251  holds the loop, as SIGSTOP would
    assert uptime.steady_seconds() == 0
    await asyncio.sleep(0.05)
    assert 0 <= uptime.steady_seconds() < STOP_SECONDS
