"""Counts, recent ends and recent events of a scheduler, and the workers that are missing.

A subscriber of the facts. Memory is bounded: only the latest ends, events and losses are kept, and at most `MAX_NAMES`
names; later ones count together.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lorrery.scheduler.core.adapters.loads import AdapterLog
from lorrery.scheduler.core.cluster_facts import Arrived, GaveBack, Joined, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import (
    AdapterEvent,
    AdapterLost,
    AdapterUnloaded,
    Admitted,
    Cancelled,
    Dropped,
    Evicted,
    Failed,
    FaultBegan,
    Finished,
    Handler,
    LoadBegan,
    LoadEnded,
    Preempted,
)
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Phases, Sequence
from lorrery.vocabulary.adapters import AdapterFigures

MAX_NAMES = 10_000
"""Most names that are kept; clients may name any tenant if there are no API keys."""
OTHERS = "(others)"
"""Stands for all later names."""


def count(figures: AdapterFigures, event: AdapterEvent) -> None:
    """Count an event of an adapter."""
    if isinstance(event, LoadBegan):
        figures.num_thrashes += event.thrash
    elif isinstance(event, LoadEnded):
        figures.num_loads += 1
        figures.num_failed_loads += event.failed
        if event.tier == "host":
            figures.host_load_ps += event.took_ps
        else:
            figures.disk_load_ps += event.took_ps
    elif isinstance(event, Evicted):
        if event.level == "gpu":
            figures.num_evictions += 1
            figures.resident_ps += event.stayed_ps
    elif isinstance(event, AdapterLost):
        figures.resident_ps += event.stayed_ps


class AdapterTally:
    """The figures of one scheduler's adapters by id, without the present stays on GPUs.

    They are counted from the events of the workers' adapters, the same for both drivers.
    """

    def __init__(self) -> None:
        self.by_adapter: dict[str, AdapterFigures] = {}

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return dict.fromkeys((LoadBegan, LoadEnded, Evicted, AdapterLost), self._take)

    def _take(self, fact: AdapterEvent, at_ps: int, member: object) -> None:
        self.count(fact)

    def count(self, fact: AdapterEvent) -> None:
        """Count a fact of an adapter."""
        count(_of(self.by_adapter, fact.adapter.adapter_id), fact)

    def forget(self, adapter_id: str) -> None:
        """Drop the figures of an adapter."""
        self.by_adapter.pop(adapter_id, None)

    def read(self, logs: Iterable[AdapterLog | None], at_ps: int) -> dict[str, AdapterFigures]:
        """Return a copy of the figures, with the present stays until now.

        Args:
            logs: of the attached workers, whose events have been recorded.
            at_ps: now.
        """
        found = {adapter_id: replace(figures) for adapter_id, figures in self.by_adapter.items()}
        for log in logs:
            for adapter, since_ps in () if log is None else log.stays.values():
                _of(found, adapter.adapter_id).resident_ps += max(0, at_ps - since_ps)
        return found


def _of(by_adapter: dict[str, AdapterFigures], adapter_id: str) -> AdapterFigures:
    figures = by_adapter.get(adapter_id)
    if figures is None:
        name = adapter_id if len(by_adapter) < MAX_NAMES else OTHERS
        figures = by_adapter.setdefault(name, AdapterFigures())
    return figures


MAX_ENDED = 200
"""Number of ends kept."""
MAX_EVENTS = 50
"""Number of frequent events kept, and of rare ones."""
MAX_MISSING = 100
"""Number of missing workers kept."""
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
class Missing:
    """A worker that was lost without draining.

    Attributes:
        pool_tokens: size of its KV pool.
        origin: the driver's record of it, see `Joined`.
    """

    name: str
    pool_tokens: int
    lost_ps: int
    origin: Any


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
    """Counts what watchers see, and keeps the latest ends and events.

    Attributes:
        preempted: number of preemptions by worker name.
        missing: by name, the lost workers that are neither back nor replaced, that is, no worker of that name has
            joined since, nor another with a KV pool of that size.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.adapters = AdapterTally()
        self.tenants: dict[str, TenantCounts] = {}
        self.preempted: dict[str, int] = {}
        self.missing: dict[str, Missing] = {}
        self._origins: dict[str, Any] = {}
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._frequent: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self._rare: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self._num_ended = self._num_frequent = self._num_rare = 0

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {
            Arrived: self._arrived,
            Placed: self._placed,
            Refused: self._refused,
            Withdrawn: self._withdrawn,
            Admitted: self._admitted,
            Preempted: self._preempted,
            Finished: self._finished,
            Cancelled: self._cancelled,
            Dropped: self._dropped,
            Failed: self._failed,
            Joined: self._joined,
            GaveBack: self._gave_back,
            FaultBegan: self._fault_began,
            LoadBegan: self._load_began,
            LoadEnded: self._load_ended,
            Evicted: self._evicted,
            AdapterLost: self._adapter_lost,
            AdapterUnloaded: self._adapter_unloaded,
        }

    # --- requests ---------------------------------------------------------------------------------------------------

    def _arrived(self, fact: Arrived, at_ps: int, member: Member | None) -> None:
        """Count it, even if refused at once; the output that a resumed one brings is not counted as new."""
        sequence = fact.sequence
        self.totals.requests += 1
        if sequence.produced_tokens:
            self.totals.output_tokens -= sequence.produced_tokens
            self._tenant(sequence.tenant_id).output_tokens -= sequence.produced_tokens

    def _placed(self, fact: Placed, at_ps: int, member: Member | None) -> None:
        if fact.moved_from:
            self.totals.moved += 1
            text = f"request {fact.sequence.handle} from {fact.moved_from} to {fact.member.name}"
            self._happened(at_ps, "moved", text)

    def _refused(self, fact: Refused, at_ps: int, member: Member | None) -> None:
        self._turned_away(fact.sequence, fact.refusal, at_ps)
        if not fact.on_arrival:
            self._end(fact.sequence, "", "refused", fact.sequence.produced_tokens, at_ps)

    def _withdrawn(self, fact: Withdrawn, at_ps: int, member: Member | None) -> None:
        if fact.refusal is not None:
            self._turned_away(fact.sequence, fact.refusal, at_ps)

    def _turned_away(self, sequence: Sequence, refusal: Refusal, at_ps: int) -> None:
        """Count a request that ends without having had a worker."""
        self.totals.refused += 1
        self._tenant(sequence.tenant_id).refused += 1
        tenant = f" of tenant {sequence.tenant_id}" if sequence.tenant_id else ""
        self._happened(at_ps, "refused", f"request{tenant}: {refusal.message}")

    def _admitted(self, fact: Admitted, at_ps: int, member: Member | None) -> None:
        if fact.first:
            self.totals.prompt_tokens += fact.sequence.prompt_tokens
        if fact.queried_tokens:
            self.totals.prefix_queries += fact.queried_tokens
            self.totals.prefix_hits += fact.sequence.cached_tokens

    def _preempted(self, fact: Preempted, at_ps: int, member: Member | None) -> None:
        worker = _name(member)
        self.totals.preempted += 1
        self.preempted[worker] = self.preempted.get(worker, 0) + 1
        self._happened(at_ps, "preempt", f"request {fact.sequence.handle} on {worker}")

    def _finished(self, fact: Finished, at_ps: int, member: Member | None) -> None:
        self.totals.finished += 1
        self._end(fact.sequence, _name(member), fact.reason.word, fact.output_tokens, fact.at_ps)

    def _cancelled(self, fact: Cancelled, at_ps: int, member: Member | None) -> None:
        withdrawal = fact.sequence.withdrawal
        if withdrawal is not None and withdrawal.by_scheduler:
            self.totals.dropped += 1
            outcome = "dropped"
        else:
            self.totals.cancelled += 1
            outcome = "cancelled"
        self._end(fact.sequence, _name(member), outcome, fact.output_tokens, at_ps)

    def _dropped(self, fact: Dropped, at_ps: int, member: Member | None) -> None:
        self.totals.dropped += 1
        self._end(fact.sequence, _name(member), "dropped", fact.sequence.produced_tokens, at_ps)

    def _failed(self, fact: Failed, at_ps: int, member: Member | None) -> None:
        self.totals.failed += 1
        self._end(fact.sequence, _name(member), "failed", fact.output_tokens, at_ps)

    def _end(self, sequence: Sequence, worker: str, outcome: str, output_tokens: int, at_ps: int) -> None:
        """Record a request's end.

        Args:
            sequence: the request.
            worker: the last worker that had it; empty: none.
            outcome: its finish reason, or `cancelled`, `dropped`, `failed`, `refused`.
            output_tokens: all that it has produced.
            at_ps: when.
        """
        self.totals.output_tokens += output_tokens
        self._tenant(sequence.tenant_id).output_tokens += output_tokens
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
                sequence.phases(at_ps),
                outcome,
            )
        )

    # --- workers ----------------------------------------------------------------------------------------------------

    def _joined(self, fact: Joined, at_ps: int, member: Member | None) -> None:
        name, pool_tokens = fact.member.name, fact.member.pool_tokens
        self.preempted.pop(name, None)
        self._origins[name] = fact.origin
        replaced = (one.name for one in self.missing.values() if one.pool_tokens == pool_tokens)
        self.missing.pop(name if name in self.missing else next(replaced, ""), None)
        self._happened(at_ps, "worker_joined", name)

    def _gave_back(self, fact: GaveBack, at_ps: int, member: Member | None) -> None:
        name = fact.member.name
        if not fact.lost:
            self._happened(at_ps, "worker_draining", name)
            return
        origin = self._origins.pop(name, None)
        if not fact.member.draining:
            self.totals.workers_lost += 1
            self.missing[name] = Missing(name, fact.member.pool_tokens, at_ps, origin)
            if len(self.missing) > MAX_MISSING:
                del self.missing[next(iter(self.missing))]
        how = "left" if fact.member.draining else "lost"
        self._happened(at_ps, "worker_lost", f"{name} {how}, {len(fact.sequences)} requests queued again")

    def _fault_began(self, fact: FaultBegan, at_ps: int, member: Member | None) -> None:
        self._happened(at_ps, "fault", fact.text)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def _adapter_lost(self, fact: AdapterLost, at_ps: int, member: Member | None) -> None:
        self.adapters.count(fact)

    def _load_began(self, fact: LoadBegan, at_ps: int, member: Member | None) -> None:
        self.adapters.count(fact)
        self._happened(fact.at_ps, "load", f"{fact.adapter.adapter_id} on {_name(member)}, from {fact.tier}")

    def _load_ended(self, fact: LoadEnded, at_ps: int, member: Member | None) -> None:
        self.adapters.count(fact)
        self.totals.loads += 1
        if fact.failed:
            self._happened(fact.at_ps, "load_failed", f"{fact.adapter.adapter_id} on {_name(member)}")

    def _evicted(self, fact: Evicted, at_ps: int, member: Member | None) -> None:
        self.adapters.count(fact)
        if fact.level == "gpu":
            self._happened(fact.at_ps, "evict", f"{fact.adapter.adapter_id} on {_name(member)}")

    def _adapter_unloaded(self, fact: AdapterUnloaded, at_ps: int, member: Member | None) -> None:
        self.adapters.forget(fact.adapter_id)

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
        """Return the position of a new reader: all but the kept events counts as read."""
        return Seen(self._num_ended, self._num_frequent - len(self._frequent), self._num_rare - len(self._rare))

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


def _name(member: Member | None) -> str:
    return "" if member is None else member.name


def _last(kept: "deque[_T]", number: int) -> "list[_T]":
    return [kept[index] for index in range(len(kept) - number, len(kept))]
