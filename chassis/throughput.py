"""How fast something is done that is only counted, for those who ask now and then."""

import time
from collections.abc import Callable

_SECONDS = 1.0


class Throughput:
    """The rate of something that is counted, over the time since it was asked for last: a second at least.

    Args:
        count: returns the number so far.
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
