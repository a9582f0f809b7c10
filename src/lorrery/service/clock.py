"""The device clock: simulated time, paced by the monotonic clock.

    device time = (monotonic - start) / time_scale

The scheduler owns one, which stamps arrivals and starts of plans. Workers and routers estimate it from the scheduler's
time stamps on messages: a stamp is never later than the clock it was read from, so the latest clock that any stamp
allows is the closest estimate (that with the least transit time). Monotonic clocks of two hosts drift apart, so an old
stamp slowly loses weight. If one host's clock jumps against the others', as that of a paused virtual machine does, the
answer to a request bounds the estimate from the other side too. The time of day is never used.
"""

import math
import time
from typing import Self

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
