"""The device clock: simulated time, paced by the monotonic clock.

    device time = (monotonic - start) / time_scale

A scheduler owns one; it stamps arrivals and starts plans by it. Workers and routers estimate it from the times that
the scheduler stamps on its messages: a stamp is never later than the clock it was read from, so the latest clock that
any stamp allows is the closest estimate (the least transit seen). Monotonic clocks of two hosts drift apart, so an old
stamp loses weight slowly. Where one host's clock jumps, as a paused virtual machine's does against the others', the
answer to a question bounds the estimate from the other side too. The time of day is used nowhere.
"""

import math
import time
from typing import Self

from lorrery.vocabulary.units import PS_PER_SECOND

DRIFT = 1e-4
"""How fast two hosts' monotonic clocks may drift apart; quartz is good for 50 ppm each."""


class DeviceClock:
    """Reads device time, and says when in monotonic time a device time comes.

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
        """Return a clock that reads `now_ps` now: the first estimate of another process's clock."""
        clock = cls(time_scale)
        clock._start_seconds -= clock._to_seconds(now_ps)
        return clock

    def now_ps(self) -> int:
        """Return the device time now."""
        return round((time.monotonic() - self._start_seconds) / self.time_scale * PS_PER_SECOND)

    def to_monotonic(self, ps: int) -> float:
        """Return when device time `ps` comes (or came), in seconds of `time.monotonic()`."""
        return self._start_seconds + self._to_seconds(ps)

    def observe(self, sent_ps: int, asked_at: float | None = None) -> float:
        """Take into account that the other process stamped `sent_ps` on a message that has just arrived.

        Moves the estimate forward if it was behind the stamp. It moves back by no more than the drift since the last
        stamp, and never behind this one; but an answer cannot have been stamped before it was asked for, and by as much
        as the estimate says so it is wrong: one of the two clocks has jumped.

        Args:
            sent_ps: the stamp.
            asked_at: `time.monotonic()` when we asked for the message; None: it is no answer.

        Returns:
            Wall seconds by which the estimate was ahead of what is possible.
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
