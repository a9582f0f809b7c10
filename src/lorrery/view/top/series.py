"""The last minute of one figure, in device time; frames may come ten times a second or, from a record, rarely."""

from collections import deque

KEPT_SECONDS = 60.0
_SPACING_SECONDS = 0.5


class Gauge:
    """A figure that goes up and down: its mean, and its past values."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()

    def push(self, at: float, value: float) -> None:
        """Add a value; times are non-decreasing. Of values in quick succession, one per half second is kept."""
        values = self._values
        if len(values) > 1 and at - values[-2][0] < _SPACING_SECONDS:
            values.pop()
        values.append((at, value))
        while len(values) > 2 and values[1][0] <= at - KEPT_SECONDS:
            values.popleft()

    def mean(self, seconds: float) -> float:
        """Return the mean of the values of the last `seconds`; 0 if there are none."""
        if not self._values:
            return 0.0
        since = self._values[-1][0] - seconds
        recent = [value for at, value in self._values if at >= since]
        return sum(recent) / len(recent)

    def before(self, seconds: float) -> float | None:
        """Return the value `seconds` ago; None: unknown."""
        if not self._values:
            return None
        since = self._values[-1][0] - seconds
        return next((value for at, value in reversed(self._values) if at <= since), None)


class Counter:
    """A count that only grows: its growth, and its rate. A smaller total means that the source has restarted.

    Attributes:
        total: the last total.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._changes: deque[tuple[float, float]] = deque()
        self._since = self._before = self._at = 0.0

    def push(self, at: float, total: float) -> None:
        """Add a total; times are non-decreasing."""
        if not self._changes or total < self.total:
            self._changes.clear()
            self._changes.append((at, total))
            self._since = self._at = at
        elif total != self.total:
            self._changes.append((at, total))
            while self._changes[1][0] <= at - KEPT_SECONDS:
                self._changes.popleft()
        self._before, self._at, self.total = self._at, at, total

    def growth(self, seconds: float) -> float:
        """Return the growth within the last `seconds`, or as far back as known."""
        return self.total - self._value(self._from(seconds))

    def rate(self, seconds: float) -> float:
        """Return the growth per second over the last `seconds`, or between the last two totals if that is longer."""
        since = self._from(seconds)
        return (self.total - self._value(since)) / (self._at - since) if self._at > since else 0.0

    def _from(self, seconds: float) -> float:
        return max(self._since, min(self._at - seconds, self._before))

    def _value(self, at: float) -> float:
        if not self._changes:
            return 0.0
        return next((total for when, total in reversed(self._changes) if when <= at), self._changes[0][1])
