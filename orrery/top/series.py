"""The last minute of one figure, by device time; frames may come ten times a second or, from a record, seldom."""

from collections import deque

KEPT_SECONDS = 60.0
_SPACING_SECONDS = 0.5


class Gauge:
    """A figure that goes up and down: its mean, and what it was."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()

    def push(self, at: float, value: float) -> None:
        """Note a value; times never fall. Of values that come quickly, one each half second is kept."""
        values = self._values
        if len(values) > 1 and at - values[-2][0] < _SPACING_SECONDS:
            values.pop()
        values.append((at, value))
        while len(values) > 2 and values[1][0] <= at - KEPT_SECONDS:
            values.popleft()

    def mean(self, seconds: float) -> float:
        """Return the mean of what was noted in the last so many seconds; 0 where nothing was."""
        if not self._values:
            return 0.0
        since = self._values[-1][0] - seconds
        recent = [value for at, value in self._values if at >= since]
        return sum(recent) / len(recent)

    def before(self, seconds: float) -> float | None:
        """Return what it was so many seconds ago; None where that is not known."""
        if not self._values:
            return None
        since = self._values[-1][0] - seconds
        return next((value for at, value in reversed(self._values) if at <= since), None)


class Counter:
    """A count that only grows: by how much, and how fast. It begins anew where whoever counts does.

    Attributes:
        total: what was noted last.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._changes: deque[tuple[float, float]] = deque()
        self._since = self._before = self._at = 0.0

    def push(self, at: float, total: float) -> None:
        """Note a total; times never fall."""
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
        """Return the growth within the last so many seconds, or as far back as is known."""
        return self.total - self._value(self._from(seconds))

    def rate(self, seconds: float) -> float:
        """Return the growth a second, over the last so many seconds, or between the last two notes if that is more."""
        since = self._from(seconds)
        return (self.total - self._value(since)) / (self._at - since) if self._at > since else 0.0

    def _from(self, seconds: float) -> float:
        return max(self._since, min(self._at - seconds, self._before))

    def _value(self, at: float) -> float:
        if not self._changes:
            return 0.0
        return next((total for when, total in reversed(self._changes) if when <= at), self._changes[0][1])
