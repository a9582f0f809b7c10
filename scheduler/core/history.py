"""Counts, recent ends and recent events of a scheduler since a reader began to watch.

A driver reports to it as things happen. Without a reader there is no history, so it costs nothing. Memory is bounded:
only the latest ends and events are kept, and at most `snapshot.MAX_NAMES` names.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from lorrery.scheduler.core.adapter_events import AdapterEvent, Evicted, LoadBegan, LoadEnded
from lorrery.scheduler.core.adapter_tally import AdapterTally
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.phases import Phases
from lorrery.scheduler.core.plan import Admitted, Event, Preempted
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.core.snapshot import MAX_NAMES, OTHERS

MAX_ENDED = 200
"""Number of ends kept."""
MAX_EVENTS = 50
"""Number of frequent events kept, and of rare ones."""
_T = TypeVar("_T")

_FREQUENT = frozenset(("load", "evict", "preempt", "refused", "moved"))
"""Kinds of events that must not displace the others."""


@dataclass(slots=True)
class Ended:
    """A request that has ended, with its phases; `worker` is empty if none had it."""

    handle: int
    worker: str
    adapter_id: str | None
    tenant_id: str
    prompt_tokens: int
    output_tokens: int
    arrived_ps: int
    phases: Phases
    outcome: str


@dataclass(slots=True)
class Happened:
    """An event."""

    number: int
    at_ps: int
    kind: str
    text: str


@dataclass(slots=True)
class TenantCounts:
    """Output tokens of requests that have ended, and requests that were refused."""

    output_tokens: int = 0
    refused: int = 0


@dataclass(slots=True)
class Totals:
    """Counts of the whole scheduler.

    `output_tokens` counts requests that have ended. `prompt_tokens`, `prefix_queries` and `prefix_hits` count requests,
    at their first admission here, not admissions.
    """

    requests: int = 0
    finished: int = 0
    refused: int = 0
    cancelled: int = 0
    dropped: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preempted: int = 0
    moved: int = 0
    workers_lost: int = 0
    loads: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(slots=True)
class Seen:
    """How much of a history its reader has read."""

    num_ended: int = 0
    num_frequent: int = 0
    num_rare: int = 0


class History:
    """See the module.

    Attributes:
        preempted: number of preemptions by worker name.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.adapters = AdapterTally()
        self.tenants: dict[str, TenantCounts] = {}
        self.preempted: dict[str, int] = {}
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._frequent: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self._rare: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self._num_ended = self._num_frequent = self._num_rare = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def arrived(self, sequence: Sequence) -> None:
        """Record an arrival, also one refused at once; the output that a resumed one brings is not counted as new."""
        self.totals.requests += 1
        if sequence.produced_tokens:
            self.totals.output_tokens -= sequence.produced_tokens
            self._tenant(sequence.tenant_id).output_tokens -= sequence.produced_tokens

    def refused(self, sequence: Sequence, why: str, at_ps: int) -> None:
        """Record a request that ends without having had a worker; `why`: the reason given to its client."""
        self.totals.refused += 1
        self._tenant(sequence.tenant_id).refused += 1
        tenant = f" of tenant {sequence.tenant_id}" if sequence.tenant_id else ""
        self._happened(at_ps, "refused", f"request{tenant}: {why}")

    def ended(self, sequence: Sequence, worker: str, outcome: str, output_tokens: int, at_ps: int) -> None:
        """Record a request's end.

        Args:
            sequence: the request.
            worker: the last worker that had it; empty: none.
            outcome: its finish reason, or `cancelled`, `dropped`, `failed`, `refused`.
            output_tokens: all that it has produced.
            at_ps: when.
        """
        totals = self.totals
        if outcome == "cancelled":
            totals.cancelled += 1
        elif outcome == "dropped":
            totals.dropped += 1
        elif outcome == "failed":
            totals.failed += 1
        elif outcome != "refused":  # those have been counted
            totals.finished += 1
        totals.output_tokens += output_tokens
        self._tenant(sequence.tenant_id).output_tokens += output_tokens
        phases = sequence.phases(at_ps)
        self._num_ended += 1
        self._ended.append(
            Ended(
                sequence.handle,
                worker,
                None if sequence.adapter is None else sequence.adapter.adapter_id,
                sequence.tenant_id,
                sequence.prompt_tokens,
                output_tokens,
                sequence.arrived_ps,
                phases,
                outcome,
            )
        )

    def moved(self, sequence: Sequence, donor: str, taker: str, at_ps: int) -> None:
        """Record a waiting request that moved to another worker."""
        self.totals.moved += 1
        self._happened(at_ps, "moved", f"request {sequence.handle} from {donor} to {taker}")

    # --- workers ----------------------------------------------------------------------------------------------------

    def decided(self, member: Member, events: Iterable[Event], at_ps: int) -> None:
        """Record the events of a worker's decision or steps, except ends, which the driver reports."""
        for event in events:
            if isinstance(event, Admitted):
                sequence = event.sequence
                if event.first:
                    self.totals.prompt_tokens += sequence.prompt_tokens
                if event.queried_tokens:
                    self.totals.prefix_queries += event.queried_tokens
                    self.totals.prefix_hits += sequence.cached_tokens
            elif isinstance(event, Preempted):
                self.totals.preempted += 1
                self.preempted[member.name] = self.preempted.get(member.name, 0) + 1
                self._happened(at_ps, "preempt", f"request {event.sequence.handle} on {member.name}")

    def adapters_changed(self, worker: str, events: Collection[AdapterEvent]) -> None:
        """Record the events of a worker's adapters."""
        for event in events:
            where = f"{event.adapter.adapter_id} on {worker}"
            if isinstance(event, LoadBegan):
                self._happened(event.at_ps, "load", f"{where}, from {event.tier}")
            elif isinstance(event, LoadEnded):
                self.totals.loads += 1
                if event.failed:
                    self._happened(event.at_ps, "load_failed", where)
            elif isinstance(event, Evicted) and event.level == "gpu":
                self._happened(event.at_ps, "evict", where)
        self.adapters.record(events)

    def joined(self, member: Member, at_ps: int) -> None:
        """Record a worker that has attached."""
        self.preempted.pop(member.name, None)
        self._happened(at_ps, "worker_joined", member.name)

    def draining(self, member: Member, at_ps: int) -> None:
        """Record a worker that is about to leave."""
        self._happened(at_ps, "worker_draining", member.name)

    def lost(self, member: Member, num_requeued: int, at_ps: int) -> None:
        """Record a worker that is gone, and how many requests are queued again."""
        if not member.draining:
            self.totals.workers_lost += 1
        how = "left" if member.draining else "lost"
        self._happened(at_ps, "worker_lost", f"{member.name} {how}, {num_requeued} requests queued again")

    def fault(self, text: str, at_ps: int) -> None:
        """Record an injected fault."""
        self._happened(at_ps, "fault", text)

    def _tenant(self, tenant_id: str) -> TenantCounts:
        counts = self.tenants.get(tenant_id)
        if counts is None:
            name = tenant_id if len(self.tenants) < MAX_NAMES else OTHERS
            counts = self.tenants.setdefault(name, TenantCounts())
        return counts

    # --- the latest -------------------------------------------------------------------------------------------------

    def _happened(self, at_ps: int, kind: str, text: str) -> None:
        number = self._num_frequent + self._num_rare
        if kind in _FREQUENT:
            self._num_frequent += 1
            self._frequent.append(Happened(number, at_ps, kind, text))
        else:
            self._num_rare += 1
            self._rare.append(Happened(number, at_ps, kind, text))

    def begin(self) -> Seen:
        """Return the position of a new reader: everything so far counts as read."""
        return Seen(self._num_ended, self._num_frequent, self._num_rare)

    def take_ended(self, seen: Seen) -> tuple[list[Ended], int]:
        """Return the latest requests that have ended since a reader's last call, and how many more there were."""
        num_new, seen.num_ended = self._num_ended - seen.num_ended, self._num_ended
        ended = _last(self._ended, min(num_new, len(self._ended)))
        return ended, num_new - len(ended)

    def take_events(self, seen: Seen) -> tuple[list[Happened], int]:
        """Return the latest events since a reader's last call, rare ones preferred, and how many more there were."""
        num_frequent, seen.num_frequent = self._num_frequent - seen.num_frequent, self._num_frequent
        num_rare, seen.num_rare = self._num_rare - seen.num_rare, self._num_rare
        rare = _last(self._rare, min(num_rare, len(self._rare)))
        frequent = _last(self._frequent, min(num_frequent, len(self._frequent), MAX_EVENTS - len(rare)))
        events = sorted(rare + frequent, key=lambda event: event.number)
        return events, num_frequent + num_rare - len(events)


def _last(kept: "deque[_T]", number: int) -> "list[_T]":
    return [kept[index] for index in range(len(kept) - number, len(kept))]
