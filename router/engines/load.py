"""How full an engine is, and how fast it is."""

import time
from collections.abc import Callable
from dataclasses import dataclass

_SECONDS = 1.0


@dataclass(frozen=True)
class Load:
    """How full an engine is.

    Attributes:
        num_unstarted_tokens: prompt tokens of this port's requests that have no token yet.
        tokens_per_second: written by this router to all its clients; wall seconds.
    """

    num_running: int
    num_waiting: int
    kv_tokens: int
    max_kv_tokens: int
    max_running: int
    num_unstarted_tokens: int
    tokens_per_second: float

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that is in use."""
        return self.kv_tokens / self.max_kv_tokens if self.max_kv_tokens else 0.0


class Throughput:
    """The rate of something that is counted, over the time since it was asked for last: a second at least.

    Args:
        count: returns the number so far.
    """

    def __init__(self, count: Callable[[], int]) -> None:
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
