"""How fast a queue drains: from how fast requests have ended lately while others waited.

With requests ending every d on average, one place becomes free each d, and the n-th that waits starts after n x d. The
k-th request refused since the last end is told to come back after k x d, so that those refused together do not come
back together. Intervals in which the queue was empty do not count: they say how fast requests come. Whether it was is
looked at when a request comes and when one ends, which sees all of them. What was measured before a pause of `STALE_PS`
is forgotten.
"""

from collections import deque

from lorrery.vocabulary.units import PS_PER_SECOND

NUM_INTERVALS = 64
"""Over so many intervals between ends the rate is taken."""
ENOUGH_INTERVALS = 8
"""So many are enough to refuse somebody for what they say."""
STALE_PS = 10 * PS_PER_SECOND
SHORTEST_PS = PS_PER_SECOND // 100
LONGEST_PS = 60 * PS_PER_SECOND


class DrainRate:
    """The intervals between ends, and who was refused since the last."""

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
        """Note that a request has ended while others wait."""
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
        """Note that nobody waits."""
        self._last_ps = None

    def wait_ps(self, num_waiting: int, at_ps: int) -> int | None:
        """Return how long one that comes after so many is expected to wait; None: too little is known to say."""
        if len(self._intervals) < ENOUGH_INTERVALS:
            return None
        return num_waiting * self._between_ps(at_ps)

    def retry_ps(self, at_ps: int) -> int | None:
        """Return after how long a request that is refused now may come in; None: too few have ended to say."""
        if not self._intervals:
            return None
        self._num_refused += 1
        return min(max(self._num_refused * self._between_ps(at_ps), SHORTEST_PS), LONGEST_PS)

    def step_ps(self, at_ps: int) -> int:
        """Return how much later than the one before it each that is refused may come in; 0 where that is not known."""
        return min(self._between_ps(at_ps), LONGEST_PS) if self._intervals else 0

    def _between_ps(self, at_ps: int) -> int:
        # Up to now, not to the last end: where nothing ends any more the rate falls.
        since_ps = 0 if self._last_ps is None else at_ps - self._last_ps
        return (self._sum_ps + since_ps) // len(self._intervals)
