"""Detects writes to a stream that do not return because the reader has stopped reading.

gRPC's `write` returns once the reader's flow-control window has room for the message, so a reader that stops blocks the
write for as long as its connection lives. Time is counted in ticks of the `AwakeClock`, so that a suspended process
blames no reader, and a write does not read a clock.
"""

from collections.abc import Awaitable
from itertools import takewhile
from typing import Generic, TypeVar

from lorrery.service.awake import AwakeClock

TICKS = 4
"""Ticks per time-out; a write may therefore last a quarter longer."""

_K = TypeVar("_K")


class Writes(Generic[_K]):
    """The writes under way, at most one per key.

    Args:
        awake: measures the time.
        timeout_seconds: how long a write may take.
    """

    def __init__(self, awake: AwakeClock, timeout_seconds: float) -> None:
        self._awake = awake
        self._tick_seconds = timeout_seconds / TICKS
        self._tick = 0
        self._begun: dict[_K, int] = {}  # in order of start

    async def write(self, key: _K, writing: Awaitable[None]) -> None:
        """Await a write."""
        self._begun[key] = self._tick
        try:
            await writing
        finally:
            self._begun.pop(key, None)

    async def stuck(self) -> list[_K]:
        """Wait until some writes exceed the time-out; return their keys, once for each write."""
        while True:
            await self._awake.sleep_until(self._awake.now() + self._tick_seconds)
            self._tick += 1
            keys = [key for key, _ in takewhile(lambda begun: begun[1] < self._tick - TICKS, self._begun.items())]
            for key in keys:
                del self._begun[key]
            if keys:
                return keys
