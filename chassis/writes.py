"""Writes to a stream that do not return: their reader has stopped reading.

gRPC's `write` returns once the reader's flow-control window has room for the message, so a reader that stops holds the
write, whatever is behind it, for as long as its connection lives. Time is counted in ticks of the `AwakeClock`: a
process that was stopped itself blames nobody, and a write costs no look at a clock.
"""

from collections.abc import Awaitable
from itertools import takewhile
from typing import Generic, TypeVar

from lorrery.chassis.awake import AwakeClock

TICKS = 4
"""In so many parts of the time-out it is counted, so a write may last a quarter longer."""

_K = TypeVar("_K")


class Writes(Generic[_K]):
    """The writes that are under way, at most one for each key.

    Args:
        awake: counts the time.
        timeout_seconds: how long a write may take.
    """

    def __init__(self, awake: AwakeClock, timeout_seconds: float) -> None:
        self._awake = awake
        self._tick_seconds = timeout_seconds / TICKS
        self._tick = 0
        self._begun: dict[_K, int] = {}  # in order of beginning

    async def write(self, key: _K, writing: Awaitable[None]) -> None:
        """Await a write."""
        self._begun[key] = self._tick
        try:
            await writing
        finally:
            self._begun.pop(key, None)

    async def stuck(self) -> list[_K]:
        """Wait until writes have lasted too long, and return their keys, each write's once."""
        while True:
            await self._awake.sleep_until(self._awake.now() + self._tick_seconds)
            self._tick += 1
            keys = [key for key, _ in takewhile(lambda begun: begun[1] < self._tick - TICKS, self._begun.items())]
            for key in keys:
                del self._begun[key]
            if keys:
                return keys
