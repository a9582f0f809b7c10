"""What the model keeps of a worker, an adapter, a tenant and an ended request, and the figures computed from it.

All times are device seconds, and all windows end at the newest frame. Frames may come ten times a second or, from a
record, rarely.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from lorrery.view.frame import EndedRow, ResidentRow, RunningRow
from lorrery.view.frame import Worker as WorkerState

BASE, NO_TENANT = "base model", "(no tenant)"
"""Display names for requests without an adapter and without a tenant."""
KEPT_SECONDS = 60.0
"""How long the past of most figures is kept."""
ALERT_SECONDS = 300.0
"""Window of the rules that Prometheus' alerts have too, of most of them."""
STEP_SECONDS = 30.0
"""Window of a worker's decode steps, for comparison with other workers."""
BUSY_SECONDS = 5.0
"""Window of a worker's busy share, and of a worker's and a tenant's tokens per second."""
THRASH_SECONDS = 60.0
"""Window of an adapter's loads soon after an eviction."""
_ALERT_SPACING_SECONDS = 2.0
_STEP_SPACING_SECONDS = 0.5
_MAX_STEPS = 60
_MIN_STEPS = 5


class Gauge:
    """The past of a figure that goes up and down.

    Args:
        kept: how long it is kept, in seconds.
        spacing: of values in quicker succession one is kept.
    """

    def __init__(self, kept: float = KEPT_SECONDS, spacing: float = 0.5) -> None:
        self._kept, self._spacing = kept, spacing
        self._values: deque[tuple[float, float]] = deque()

    def push(self, at: float, value: float) -> None:
        """Add a value; times are non-decreasing."""
        values = self._values
        if len(values) > 1 and at - values[-2][0] < self._spacing:
            values.pop()
        values.append((at, value))
        while len(values) > 2 and values[1][0] <= at - self._kept:
            values.popleft()

    @property
    def seconds(self) -> float:
        """How far back it is known."""
        return self._values[-1][0] - self._values[0][0] if self._values else 0.0

    @property
    def least(self) -> float:
        """The least of all kept values; 0 if there are none."""
        return min([value for _, value in self._values], default=0.0)

    @property
    def slope(self) -> float:
        """Growth per second over all kept values, by least squares; 0 if there are fewer than two."""
        if len(self._values) < 2:
            return 0.0
        mean_at, mean = (sum(one) / len(self._values) for one in zip(*self._values, strict=True))
        square = sum([(at - mean_at) ** 2 for at, _ in self._values])
        return sum([(at - mean_at) * (value - mean) for at, value in self._values]) / square if square else 0.0

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
    """The past of a count that only grows. A smaller total means that the source has restarted.

    Args:
        kept: how long it is kept, in seconds.
        spacing: of changes in quicker succession one is kept.

    Attributes:
        total: the last total.
    """

    def __init__(self, kept: float = KEPT_SECONDS, spacing: float = 0.0) -> None:
        self._kept, self._spacing = kept, spacing
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
            if len(self._changes) > 1 and at - self._changes[-2][0] < self._spacing:
                self._changes.pop()
            self._changes.append((at, total))
            if self._changes[1][0] <= at - self._kept:
                del self._changes[: self._index(at - self._kept)]
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


def alert_counter() -> Counter:
    """Return a counter that reaches back as far as most alerts do."""
    return Counter(ALERT_SECONDS, _ALERT_SPACING_SECONDS)


def alert_gauge() -> Gauge:
    """Return a gauge that reaches back as far as most alerts do."""
    return Gauge(ALERT_SECONDS, _ALERT_SPACING_SECONDS)


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
        ended: number of its requests that have ended; `queued`: seconds that these waited, together.
    """

    key: str
    running: int = 0
    waiting: int = 0
    oldest: float = 0.0
    tokens: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=alert_counter)
    ended: Counter = field(default_factory=alert_counter)
    queued: Counter = field(default_factory=alert_counter)
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


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a worker decodes: medians over its recent decode steps.

    Attributes:
        step: seconds.
        batch: sequences.
        context: tokens of all sequences together.
    """

    step: float
    batch: float
    context: float

    def times_slower(self, peer: "Pace") -> float:
        """Return how many times as long its steps take as a peer's.

        A larger batch or a longer context excuses longer steps in proportion, which is more than they can explain: a
        step also has a part that does not grow with either, the reading of the weights.
        """
        excuse = max(1.0, self.batch / peer.batch, self.context / peer.context)
        return self.step / (peer.step * excuse)


@dataclass(slots=True)
class Worker:
    """A worker: its part of the newest frame, and its history.

    Attributes:
        joined_at: when a request last joined its batch.
        ran_at: when it last had a batch.
        progressed_at: when it last ended a step, or had no batch.
        lost_at: when it was lost; None: it is attached.
        kv_ratios: shares of its KV pool in use; `waitings`: lengths of its queue.
        late: seconds that it stood idle although it had a plan; `busy_since`: seconds in steps.
    """

    name: str
    state: WorkerState
    joined_at: float
    ran_at: float
    progressed_at: float
    lost_at: float | None = None
    requests: frozenset[int] = frozenset()
    tokens: Counter = field(default_factory=Counter)
    busy: Counter = field(default_factory=Counter)
    preempted: Counter = field(default_factory=Counter)
    kv_ratios: Gauge = field(default_factory=alert_gauge)
    waitings: Gauge = field(default_factory=alert_gauge)
    late: Counter = field(default_factory=alert_counter)
    busy_since: Counter = field(default_factory=alert_counter)
    _steps: deque[tuple[float, float, int, int]] = field(default_factory=lambda: deque(maxlen=_MAX_STEPS))

    @property
    def kind(self) -> tuple[str, int, int]:
        """What makes workers peers: GPU, number of GPUs, and size of the KV pool."""
        return self.state.gpu, self.state.tp, self.state.pool

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
        if not requests or state.tokens != self.state.tokens or state.busy != self.state.busy:
            self.progressed_at = at
        if state.kind == "decode" and state.step and requests:
            if len(self._steps) > _MIN_STEPS and at - self._steps[-2][0] < _STEP_SPACING_SECONDS:
                self._steps.pop()  # but the first ones are kept, so that a short look suffices
            context = sum([row.prompt_tokens + row.output_tokens for row in state.running])
            self._steps.append((at, state.step, len(state.running), context))
        self.state, self.requests, self.lost_at = state, requests, None
        self.tokens.push(at, state.tokens)
        self.busy.push(at, state.busy)
        self.preempted.push(at, state.preempted)
        self.kv_ratios.push(at, self.kv_ratio)
        self.waitings.push(at, state.waiting)
        self.late.push(at, state.late)
        self.busy_since.push(at, state.busy)

    def pace(self, at: float) -> Pace | None:
        """Return its pace over the last `STEP_SECONDS`; None: it has decoded too little."""
        recent = [one for one in self._steps if at - one[0] <= STEP_SECONDS]
        if len(recent) < _MIN_STEPS or self.lost_at is not None:
            return None
        _, steps, batches, contexts = zip(*recent, strict=True)
        return Pace(median(steps), median(batches), max(1.0, median(contexts)))


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
