"""A histogram for what happens per message or per step, where the client library's would cost too much.

The client library's counters take a lock and cost one to two microseconds a time. This one counts in plain integers,
and is read out when somebody asks.
"""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric


class CheapHistogram:
    """A histogram without locks or labels, for the event loop's thread only.

    Args:
        buckets: upper bounds, ascending; a last one without bound is added.
    """

    def __init__(self, name: str, help_text: str, buckets: Sequence[float]) -> None:
        self._name, self._help = name, help_text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self) -> Metric:
        """Return what it has counted."""
        family = HistogramMetricFamily(self._name, self._help)
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric([], buckets=buckets, sum_value=self._sum)
        return family
