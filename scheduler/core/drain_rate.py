"""How fast a queue drains: the rate at which requests have ended lately while others waited.

With requests ending every d on average, one place becomes free each d, and the n-th waiting request starts after n x d.
The k-th request refused since the last end is told to retry after k x d, so that clients refused together do not come
back together. Intervals in which the queue was empty do not count: they measure arrivals. The queue is checked for that
when a request arrives and when one ends, which catches all of them. Measurements from before a pause of `STALE_PS` are
discarded.
"""

from collections import deque

from lorrery.vocabulary.units import PS_PER_SECOND

NUM_INTERVALS = 64
"""Number of intervals between ends that the rate averages."""
ENOUGH_INTERVALS = 8
"""Number of intervals from which on requests are refused for their expected wait."""
STALE_PS = 10 * PS_PER_SECOND
SHORTEST_PS = PS_PER_SECOND // 100
LONGEST_PS = 60 * PS_PER_SECOND


class DrainRate:
    """The intervals between ends, and the number of refusals since the last end."""

    def __init__(self) -> None:
        self._intervals: deque[int] = deque()
        self._sum_ps = 0
        self._last_ps: int | None = None  # None: the queue has been empty since
        self._measured_ps = 0
        self._num_refused = 0

    @property
    def is_measuring(self) -> bool:
        """Whether others waited at the last end, as far as is known."""
        return self._last_ps is not None

    def ended(self, at_ps: int) -> None:
        """Record that a request has ended while others wait."""
        last_ps = self._last_ps
        if last_ps is not None:
            self._intervals.append(at_ps - last_ps)
            self._sum_ps += at_ps - last_ps
            if len(self._intervals) > NUM_INTERVALS:
                self._sum_ps -= self._intervals.popleft()
        elif at_ps - self._measured_ps > STALE_PS:
            self._intervals.clear()
            self._sum_ps = 0
        self._last_ps = self._measured_ps = at_ps
        self._num_refused = 0

    def emptied(self) -> None:
        """Record that nothing waits."""
        self._last_ps = None

    def wait_ps(self, num_waiting: int, at_ps: int) -> int | None:
        """Return the expected wait behind `num_waiting` requests; None: too few measurements."""
        if len(self._intervals) < ENOUGH_INTERVALS:
            return None
        return num_waiting * self._between_ps(at_ps)

    def retry_ps(self, at_ps: int) -> int | None:
        """Return after how long a request refused now may retry, and count the refusal; None: no measurement."""
        if not self._intervals:
            return None
        self._num_refused += 1
        return min(max(self._num_refused * self._between_ps(at_ps), SHORTEST_PS), LONGEST_PS)

    def step_ps(self, at_ps: int) -> int:
        """Return the retry delay between one refused request and the next; 0 if there is no measurement."""
        return min(self._between_ps(at_ps), LONGEST_PS) if self._intervals else 0

    def _between_ps(self, at_ps: int) -> int:
        # Up to now, not to the last end: the rate falls if requests stop ending.
        since_ps = 0 if self._last_ps is None else at_ps - self._last_ps
        return (self._sum_ps + since_ps) // len(self._intervals)
