"""When to try again at a full queue: from how fast requests have ended lately.

With requests ending every d on average, one place becomes free each d. The k-th request refused since the last end is
told k x d, so that those refused together do not come back together.
"""

from collections import deque

from lorrery.vocabulary.units import PS_PER_SECOND

NUM_ENDS = 64
"""Over so many ends the rate is taken."""
SHORTEST_PS = PS_PER_SECOND // 100
LONGEST_PS = 60 * PS_PER_SECOND


class DrainRate:
    """The ends of requests, and those refused since the last."""

    def __init__(self) -> None:
        self._ends: deque[int] = deque(maxlen=NUM_ENDS)
        self._num_refused = 0

    def ended(self, at_ps: int) -> None:
        """Note that a request has ended."""
        self._ends.append(at_ps)
        self._num_refused = 0

    def retry_ps(self, at_ps: int) -> int | None:
        """Return after how long a request that is refused now may come in; None: too few have ended to say."""
        if len(self._ends) < 2:
            return None
        self._num_refused += 1
        # Up to now, not to the last end: where nothing ends any more the rate falls.
        between_ps = (at_ps - self._ends[0]) // (len(self._ends) - 1)
        return min(max(self._num_refused * between_ps, SHORTEST_PS), LONGEST_PS)
