"""Clocks: device time, paced by the monotonic clock, and the time for which this process has run.

    device time = (monotonic - start) / time_scale

The scheduler owns one, which stamps arrivals and starts of plans. Workers and routers estimate it from the scheduler's
time stamps on messages: a stamp is never later than the clock it was read from, so the latest clock that any stamp
allows is the closest estimate (that with the least transit time). Monotonic clocks of two hosts drift apart, so an old
stamp slowly loses weight. If one host's clock jumps against the others', as that of a paused virtual machine does, the
answer to a request bounds the estimate from the other side too. The time of day is never used.

Time-outs of peers go by `UptimeClock`, which counts only the time for which this process has run. A process that was
suspended (SIGSTOP, a paused virtual machine, a laptop's lid) wakes up with every time-out overdue and all messages of
its peers unread. On this clock it has not waited: time between two ticks counts as at most one tick, so data in sockets
is read before any peer is timed out.
"""

import asyncio
import math
import time
from collections.abc import Awaitable
from typing import Self, TypeVar

from lorrery.vocabulary.units import PS_PER_SECOND

DRIFT = 1e-4
"""Upper bound on the drift between two hosts' monotonic clocks; quartz is good for 50 ppm each."""


class DeviceClock:
    """Reads device time, and converts device times to monotonic times.

    Args:
        time_scale: wall seconds per device second; 2 means everything takes twice as long.
    """

    def __init__(self, time_scale: float) -> None:
        if not time_scale > 0:
            raise ValueError(f"time_scale is {time_scale}; it must be positive")
        self.time_scale = time_scale
        self._start_seconds = time.monotonic()
        self._observed_at_seconds = self._start_seconds

    @classmethod
    def synced(cls, time_scale: float, now_ps: int) -> Self:
        """Return a clock that reads `now_ps` now: a first estimate of another process's clock."""
        clock = cls(time_scale)
        clock._start_seconds -= clock._to_seconds(now_ps)
        return clock

    def now_ps(self) -> int:
        """Return the device time now."""
        return round((time.monotonic() - self._start_seconds) / self.time_scale * PS_PER_SECOND)

    def to_monotonic(self, ps: int) -> float:
        """Return the time of `time.monotonic()`, in seconds, at which device time `ps` is (or was) reached."""
        return self._start_seconds + self._to_seconds(ps)

    def observe(self, sent_ps: int, asked_at: float | None = None) -> float:
        """Update the estimate with the stamp `sent_ps` of a message that has just arrived.

        Moves the estimate forward if it was behind the stamp. Moves it back by no more than the drift since the last
        stamp, and never behind this one. An answer, however, cannot have been stamped before it was requested: if the
        estimate says so, it is wrong by the difference, because one of the two clocks has jumped.

        Args:
            sent_ps: the stamp.
            asked_at: `time.monotonic()` at the request that the message answers; None: it answers none.

        Returns:
            Wall seconds by which the estimate was ahead of the latest possible time; 0 if it was not.
        """
        now = time.monotonic()
        drifted = self._start_seconds + DRIFT * (now - self._observed_at_seconds)
        self._start_seconds = min(drifted, now - self._to_seconds(sent_ps))
        self._observed_at_seconds = now
        earliest = -math.inf if asked_at is None else asked_at - self._to_seconds(sent_ps)
        ahead = max(0.0, earliest - self._start_seconds)
        self._start_seconds += ahead
        return ahead

    def _to_seconds(self, ps: int) -> float:
        return ps / PS_PER_SECOND * self.time_scale


TICK_SECONDS = 0.1
STOP_TICKS = 5
"""A tick later than this many ticks counts as a suspension."""

_T = TypeVar("_T")


class UptimeClock:
    """Counts the seconds in which the running event loop serves its timers.

    Args:
        tick_seconds: tick interval; a suspension of any length counts for at most two ticks.
    """

    def __init__(self, tick_seconds: float = TICK_SECONDS) -> None:
        self._tick_seconds = tick_seconds
        self._counted = 0.0
        self._ticked: float | None = None
        self._steady_since = 0.0

    def now(self) -> float:
        """Return the seconds counted so far; the first call, inside the loop, starts the clock."""
        if self._ticked is None:
            self._ticked, self._steady_since = time.monotonic(), -math.inf
            self._arm()
        return self._counted + min(time.monotonic() - self._ticked, self._tick_seconds)

    def steady_seconds(self) -> float:
        """Return how long the loop has run since the last suspension; a wait ending just after one proves nothing."""
        now = self.now()
        assert self._ticked is not None
        stopped = time.monotonic() - self._ticked > STOP_TICKS * self._tick_seconds
        return 0.0 if stopped else now - self._steady_since

    async def sleep_until(self, when: float) -> None:
        """Return once the clock reads `when`."""
        while (left := when - self.now()) > 0:  # noqa: ASYNC110  waits for a time
            await asyncio.sleep(left)

    async def within(self, seconds: float, awaitable: Awaitable[_T]) -> _T:
        """Await `awaitable` with a time-out on this clock.

        Raises:
            TimeoutError: `seconds` have passed; the awaitable is cancelled.
        """
        future = asyncio.ensure_future(awaitable)
        end = self.now() + seconds
        try:
            while not future.done() and (left := end - self.now()) > 0:
                await asyncio.wait((future,), timeout=left)
            if not future.done():
                raise TimeoutError
            return future.result()
        finally:
            future.cancel()

    def _arm(self) -> None:
        asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        assert self._ticked is not None
        now = time.monotonic()
        passed, self._ticked = now - self._ticked, now
        self._counted += min(passed, 2 * self._tick_seconds)
        if passed > STOP_TICKS * self._tick_seconds:
            self._steady_since = self._counted
        self._arm()
