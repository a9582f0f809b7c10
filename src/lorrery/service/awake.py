"""A clock that counts only the time for which this process has run, for time-outs of peers.

A process that was suspended (SIGSTOP, a paused virtual machine, a laptop's lid) wakes up with every time-out overdue
and all messages of its peers unread. On this clock it has not waited: time between two ticks counts as at most one
tick, so data in sockets is read before any peer is timed out.
"""

import asyncio
import math
import time
from collections.abc import Awaitable
from typing import TypeVar

TICK_SECONDS = 0.1
STOP_TICKS = 5
"""A tick later than this many ticks counts as a suspension."""

_T = TypeVar("_T")


class AwakeClock:
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
