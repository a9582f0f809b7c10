"""A histogram for what happens per message or per step, where the client library's would cost too much.

The client library's counters take a lock and cost one to two microseconds a time. This one counts in plain integers,
and is read out when somebody asks.
"""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """The counts of one histogram, without locks, for the event loop's thread only.

    Args:
        bounds: upper bounds of the buckets, ascending; a last one without bound is added.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return (upper bound, values up to it) of each bucket, and the sum of all values."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self._sum
