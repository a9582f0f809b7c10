"""A histogram for what happens per message or per step, where the client library's would cost too much.

The client library's counters take a lock and cost one to two microseconds a time. This one counts in plain integers,
and is read out when somebody asks.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """The counts of one histogram, without locks, for the event loop's thread only.

    Args:
        bounds: upper bounds of the buckets, ascending; a last one without bound is added.

    Attributes:
        exemplars: by number of the bucket: the trace of a value that lately fell into it, and the value.
    """

    __slots__ = ("_bounds", "_counts", "_sum", "exemplars")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self.exemplars: dict[int, tuple[str, float]] = {}

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def exemplify(self, value: float, trace_id: str) -> None:
        """Show a trace as an example of a value that has been observed."""
        self.exemplars[bisect_left(self._bounds, value)] = trace_id, value

    def read(self) -> tuple[list[int], float]:
        """Return how many values are up to each bound, the last without bound included, and the sum of all values."""
        return list(accumulate(self._counts)), self._sum
