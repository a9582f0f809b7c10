"""The rate of a counter, computed when it is queried."""

import time
from collections.abc import Callable

_SECONDS = 1.0


class Throughput:
    """The rate of a counter over the time since the last query, at least a second.

    Args:
        count: returns the current value of the counter.
    """

    def __init__(self, count: Callable[[], float]) -> None:
        self._count = count
        self._rate = 0.0
        self._last = (time.monotonic(), count())

    def per_second(self) -> float:
        """Return the rate; wall seconds."""
        now, count = time.monotonic(), self._count()
        at, counted = self._last
        if now - at >= _SECONDS:
            self._rate, self._last = (count - counted) / (now - at), (now, count)
        return self._rate
