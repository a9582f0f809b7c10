"""Which requests a scheduler accepts: its rules, the checks that need the request alone, and those of what waits.

What waits (`Backlog`): number by tenant, expected wait of a new request, and requests whose deadline passes.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.facts import Admitted, Event, Preempted
from lorrery.scheduler.core.refusals import Limits, Refusal, check_lengths
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND


@dataclass(frozen=True, slots=True)
class ClusterRules:
    """What a scheduler accepts, and how long it lets requests wait.

    Attributes:
        max_req_input_len: longest prompt.
        max_req_total_len: longest prompt and output.
        max_total_token_num: KV pool that a request must fit into; None: the largest attached one.
        max_waiting_requests: bound on waiting requests, whether for a batch or for a worker.
        max_waiting_requests_per_tenant: the same per tenant.
        deadline_admission: refuse requests not expected to start before their deadline, and those still waiting at it.
        start_within_seconds: how long after its arrival a request must start, in device seconds; None: only its own
            deadline counts. Only with `deadline_admission`.
        worker_wait_seconds: how long a request waits for a worker, in wall seconds.
        max_worker_losses: a sequence is given up once this many workers were lost with it in their batch.
        time_scale: wall seconds per device second.
    """

    max_req_input_len: int = NEVER
    max_req_total_len: int = NEVER
    max_total_token_num: int | None = None
    max_waiting_requests: int = NEVER
    max_waiting_requests_per_tenant: int = NEVER
    deadline_admission: bool = False
    start_within_seconds: float | None = None
    worker_wait_seconds: float = 30.0
    max_worker_losses: int = NEVER
    time_scale: float = 1.0


NO_RULES = ClusterRules()


class LengthCheck:
    """Checks a request by itself, without the state of the scheduler.

    Args:
        rules: of the scheduler.
    """

    def __init__(self, rules: ClusterRules) -> None:
        self._rules = rules
        self._own_limits = _limits(rules, NEVER)
        self._limits = self._own_limits

    def set_pools(self, pools: Iterable[int]) -> None:
        """Bound requests by the largest of these KV pools, unless the rules set a bound; without pools, none is set."""
        self._limits = _limits(self._rules, max(pools, default=NEVER))

    def refuse(self, sequence: Sequence, *, accepted_before: bool) -> Refusal | None:
        """Return why a request is not accepted; None: it is.

        A request accepted before, by a scheduler that is gone, is not checked against the workers attached so far.
        """
        if sequence.prompt_tokens < 1 or sequence.max_new_tokens < 1:
            return refusals.nothing_to_do(sequence)
        limits = self._own_limits if accepted_before else self._limits
        wrong = None if limits is None else check_lengths(sequence.prompt_tokens, sequence.max_new_tokens, limits)
        return None if limits is None or wrong is None else refusals.too_long(wrong, sequence, limits)


def _limits(rules: ClusterRules, pool: int) -> Limits | None:
    """Return the limits on lengths, given the largest pool; None: there are none."""
    if rules.max_total_token_num is not None:
        pool = rules.max_total_token_num
    limits = Limits(rules.max_req_input_len, rules.max_req_total_len, pool)
    return None if limits == Limits(NEVER, NEVER, NEVER) else limits


NUM_INTERVALS = 64
"""Number of intervals between ends that the rate averages."""
ENOUGH_INTERVALS = 8
"""Number of intervals from which on requests are refused for their expected wait."""
STALE_PS = 10 * PS_PER_SECOND
SHORTEST_PS = PS_PER_SECOND // 100
LONGEST_PS = 60 * PS_PER_SECOND


class DrainRate:
    """How fast a queue drains: the rate at which requests have ended lately while others waited.

    With requests ending every d on average, one place becomes free each d, and the n-th waiting request starts after
    n x d. The k-th request refused since the last end is told to retry after k x d, so that clients refused together do
    not come back together. Intervals in which the queue was empty do not count: they measure arrivals. The queue is
    checked for that when a request arrives and when one ends, which catches all of them. Measurements from before a
    pause of `STALE_PS` are discarded.
    """

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


class Backlog:
    """What waits: number by tenant, expected wait of a new request, and requests whose deadline passes.

    Kept only if a rule needs it (`max_waiting_requests_per_tenant`, `deadline_admission`); except for the drain rate,
    which goes into every refusal by a full queue. A request waits from its arrival, or its return from a batch, until a
    batch admits it or it ends: in a worker's queue or inbox, for a worker, or for a slot of its API key.

    A new request is expected to start once as many requests have ended as wait now (`DrainRate`): right for a queue in
    order of arrival, and on average for any other. With too few measured ends this refuses nothing. A request still
    waiting at its deadline leaves then. Exempt are requests that have been in a batch once, and resumed requests.

    Args:
        rules: of the scheduler.

    Attributes:
        is_kept: whether any rule needs it.
        drain_rate: of all waiting requests; measured in any case.
    """

    def __init__(self, rules: ClusterRules) -> None:
        self.drain_rate = DrainRate()
        self._most_per_tenant = rules.max_waiting_requests_per_tenant
        within = rules.start_within_seconds if rules.deadline_admission else None
        self._within_ps = None if within is None else round(within * PS_PER_SECOND)
        self.is_kept = rules.deadline_admission or self._most_per_tenant < NEVER
        self._waiting: dict[int, Sequence] = {}  # by handle
        self._num_of_tenant: dict[str, int] = {}
        self._deadlines: list[tuple[int, int]] = []  # heap of (deadline, handle); may include some that wait no more

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return len(self._waiting)

    @property
    def until_ps(self) -> int | None:
        """When the next deadline of a waiting request passes; None: never."""
        deadlines = self._deadlines
        while deadlines and not self._may_expire(deadlines[0][1]):
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def _may_expire(self, handle: int) -> bool:
        sequence = self._waiting.get(handle)
        return sequence is not None and sequence.first_admitted_ps is None

    # --- arrivals ---------------------------------------------------------------------------------------------------

    def refuse(self, sequence: Sequence, at_ps: int) -> Refusal | None:
        """Return why a new request may not wait; None: it may. Sets the deadline that the rules give it."""
        num = self._num_of_tenant.get(sequence.tenant_id, 0)
        if num >= self._most_per_tenant:
            retry_ps, step_ps = self.drain_rate.retry_ps(at_ps), self.drain_rate.step_ps(at_ps)
            return refusals.tenant_queue_full(sequence.tenant_id, num, self._most_per_tenant, retry_ps, step_ps)
        all_alike = False
        if self._within_ps is not None:
            latest_ps = sequence.arrived_ps + self._within_ps
            all_alike = sequence.deadline_ps is None or latest_ps <= sequence.deadline_ps
            if all_alike:
                sequence.deadline_ps = latest_ps
        if sequence.deadline_ps is None:
            return None
        wait_ps, left_ps = self.drain_rate.wait_ps(len(self._waiting), at_ps) or 0, sequence.deadline_ps - at_ps
        if wait_ps < left_ps:
            return None
        retry_ps = self.drain_rate.retry_ps(at_ps)
        if retry_ps is not None:
            retry_ps = max(retry_ps, wait_ps - left_ps)
        step_ps = self.drain_rate.step_ps(at_ps)
        return refusals.too_late(wait_ps, left_ps, retry_ps, step_ps, all_alike=all_alike)

    def enter(self, sequence: Sequence) -> None:
        """Count a sequence as waiting from now on."""
        handle = sequence.handle
        if handle in self._waiting:
            return
        self._waiting[handle] = sequence
        self._num_of_tenant[sequence.tenant_id] = self._num_of_tenant.get(sequence.tenant_id, 0) + 1
        if sequence.deadline_ps is not None and sequence.first_admitted_ps is None:
            heappush(self._deadlines, (sequence.deadline_ps, handle))

    # --- departures -------------------------------------------------------------------------------------------------

    def note(self, events: Iterable[Event]) -> None:
        """Apply the events of a worker's decision; ends are reported through `ended`."""
        for event in events:
            if isinstance(event, Admitted):
                self._leave(event.sequence)
            elif isinstance(event, Preempted):
                self.enter(event.sequence)

    def ended(self, sequence: Sequence, at_ps: int, *, others_wait: bool) -> None:
        """Record an end of whatever kind."""
        if self.is_kept:
            self._leave(sequence)
        deadline_ps = sequence.deadline_ps
        if not others_wait:
            self.drain_rate.emptied()
        elif deadline_ps is None or at_ps < deadline_ps or sequence.first_admitted_ps is not None:
            self.drain_rate.ended(at_ps)  # an expired wait drains nothing: many deadlines may pass at once

    def expired(self, at_ps: int, most: int) -> list[Sequence]:
        """Return waiting requests whose deadline has passed, at most `most`, each of them once."""
        found: list[Sequence] = []
        while len(found) < most and (until_ps := self.until_ps) is not None and until_ps <= at_ps:
            found.append(self._waiting[heappop(self._deadlines)[1]])
        return found

    def _leave(self, sequence: Sequence) -> None:
        if self._waiting.pop(sequence.handle, None) is None:
            return
        tenant = sequence.tenant_id
        num = self._num_of_tenant[tenant] - 1
        if num:
            self._num_of_tenant[tenant] = num
        else:
            del self._num_of_tenant[tenant]
