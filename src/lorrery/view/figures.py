"""What the model keeps of a worker, an adapter, a tenant and an ended request, and the figures computed from it.

All times are device seconds, and all windows end at the newest frame. Frames may come ten times a second or, from a
record, rarely.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lorrery.view.frame import EndedRow, ResidentRow, RunningRow
from lorrery.view.frame import Worker as WorkerState

BASE, NO_TENANT = "base model", "(no tenant)"
"""Display names for requests without an adapter and without a tenant."""
KEPT_SECONDS = 60.0
"""How long the past of a figure is kept."""
BUSY_SECONDS = 5.0
"""Window of a worker's busy share, and of a worker's and a tenant's tokens per second."""
THRASH_SECONDS = 60.0
"""Window of an adapter's loads soon after an eviction."""
_SPACING_SECONDS = 0.5


class Gauge:
    """The last minute of a figure that goes up and down."""

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
    """The last minute of a count that only grows. A smaller total means that the source has restarted.

    Attributes:
        total: the last total.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._changes: list[tuple[float, float]] = []
        self._since = self._before = self._at = 0.0

    def push(self, at: float, total: float) -> None:
        """Add a total; times are non-decreasing."""
        if not self._changes or total < self.total:
            self._changes.clear()
            self._changes.append((at, total))
            self._since = self._at = at
        elif total != self.total:
            self._changes.append((at, total))
            if self._changes[1][0] <= at - KEPT_SECONDS:
                del self._changes[: self._index(at - KEPT_SECONDS)]
        self._before, self._at, self.total = self._at, at, total

    def growth(self, seconds: float) -> float:
        """Return the growth within the last `seconds`, or as far back as known."""
        return self.total - self._value(self._from(seconds)) if len(self._changes) > 1 else 0.0

    def rate(self, seconds: float) -> float:
        """Return the growth per second over the last `seconds`, or between the last two totals if that is longer."""
        since = self._from(seconds)
        return (self.total - self._value(since)) / (self._at - since) if self._at > since else 0.0

    def _from(self, seconds: float) -> float:
        return max(self._since, min(self._at - seconds, self._before))

    def _value(self, at: float) -> float:
        return self._changes[max(0, self._index(at))][1] if self._changes else 0.0

    def _index(self, at: float) -> int:
        """Return the index of the last change at or before a time; -1 if there is none."""
        return bisect_right(self._changes, (at, math.inf)) - 1


@dataclass(slots=True)
class Adapter:
    """An adapter, or the base model, over all workers.

    Attributes:
        key: its name; None: the base model.
        unloaded: whether it is refused to new requests.
    """

    key: str | None
    unloaded: bool = False
    running: int = 0
    waiting: int = 0
    on_gpus: int = 0
    loading: int = 0
    rank: int = 0
    loads: Counter = field(default_factory=Counter)
    evictions: Counter = field(default_factory=Counter)
    thrash: Counter = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """Its display name."""
        return BASE if self.key is None else self.key

    @property
    def is_gone(self) -> bool:
        """Whether it is unloaded and its last request has ended."""
        return self.unloaded and not self.running and not self.waiting

    @property
    def recent_thrash(self) -> int:
        """Number of loads within a minute of an eviction, in the last minute."""
        return int(self.thrash.growth(THRASH_SECONDS))


@dataclass(slots=True)
class Tenant:
    """A tenant's current requests, and its totals.

    Attributes:
        key: its name; empty: requests of no tenant.
    """

    key: str
    running: int = 0
    waiting: int = 0
    oldest: float = 0.0
    tokens: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    runnings: Gauge = field(default_factory=Gauge)
    waitings: Gauge = field(default_factory=Gauge)

    @property
    def name(self) -> str:
        """Its display name."""
        return self.key or NO_TENANT

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, over `BUSY_SECONDS`."""
        return self.tokens.rate(BUSY_SECONDS)


@dataclass(slots=True)
class Worker:
    """A worker: its part of the newest frame, and its history.

    Attributes:
        joined_at: when a request last joined its batch.
        ran_at: when it last had a batch.
        lost_at: when it was lost; None: it is attached.
    """

    name: str
    state: WorkerState
    joined_at: float
    ran_at: float
    lost_at: float | None = None
    requests: frozenset[int] = frozenset()
    tokens: Counter = field(default_factory=Counter)
    busy: Counter = field(default_factory=Counter)
    preempted: Counter = field(default_factory=Counter)

    @property
    def key(self) -> str:
        """Its scheduler's index and its name: unique in the cluster."""
        return f"{self.state.shard}/{self.name}"

    @property
    def running(self) -> Sequence[RunningRow]:
        """Its batch; empty if it is lost."""
        return self.state.running if self.lost_at is None else ()

    @property
    def waiting(self) -> int:
        """Length of its queue; 0 if it is lost."""
        return self.state.waiting if self.lost_at is None else 0

    @property
    def resident(self) -> Sequence[ResidentRow]:
        """Adapters on its GPU; empty if it is lost."""
        return self.state.adapters if self.lost_at is None else ()

    @property
    def kv_ratio(self) -> float:
        """Share of its KV pool in use; 0 if it is lost."""
        return self.state.kv / self.state.pool if self.state.pool and self.lost_at is None else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, over `BUSY_SECONDS`; 0 if it is lost."""
        return self.tokens.rate(BUSY_SECONDS) if self.lost_at is None else 0.0

    @property
    def busy_ratio(self) -> float:
        """Share of time in steps, over `BUSY_SECONDS`; 0 if it is lost."""
        return min(1.0, self.busy.rate(BUSY_SECONDS)) if self.lost_at is None else 0.0

    def update(self, at: float, state: WorkerState) -> None:
        """Apply its part of a frame."""
        requests = frozenset([row.request for row in state.running])
        if requests - self.requests:
            self.joined_at = at
        if requests:
            self.ran_at = at
        self.state, self.requests, self.lost_at = state, requests, None
        self.tokens.push(at, state.tokens)
        self.busy.push(at, state.busy)
        self.preempted.push(at, state.preempted)


@dataclass(frozen=True, slots=True)
class Ended:
    """An ended request, with names instead of indices; `ttft` is from its arrival at the scheduler."""

    at: float
    row: EndedRow
    worker: str
    adapter: str
    tenant: str
    ttft: float


def percentiles(ended: Iterable[Ended]) -> tuple[float, float] | None:
    """Return the percentiles 50 and 95 of their TTFT; None: there are none."""
    times = sorted([one.ttft for one in ended])
    return (times[len(times) // 2], times[len(times) * 95 // 100]) if times else None
