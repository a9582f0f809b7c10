"""What a comparison needs to know of one run beyond its report: adapters' uses, and whether a queue had a choice.

Two runs are the same if their placements, admissions, preemptions, drops and ends are, in order and time, to the
picosecond: `digest` is a hash of all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any

from lorrery.scheduler.core.cluster_facts import Placed, Refused
from lorrery.scheduler.core.facts import (
    Admitted,
    Cancelled,
    Dropped,
    Failed,
    Finished,
    Handler,
    LoadBegan,
    LoadEnded,
    Preempted,
    Recalled,
)
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.sequence import Sequence
from lorrery.simulator.arena.fairness import Served
from lorrery.simulator.arena.oracle import Use, fewest_loads
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.plan.level import Level

__all__ = ["Watch"]

_NO_LIMIT = 1 << 30
"""Places of a worker that keeps any number of adapters."""

_Key = tuple[int, int]
"""Of a waiting sequence in order of arrival: first arrival, handle."""


@dataclass(slots=True)
class _Worker:
    """One worker from its attachment on.

    Attributes:
        waiting: keys by handle.
        running: adapters' keys by handle; None: the base model.
        uses: of its adapters.
        places: most adapters on its GPU at a time, if these are the smallest that it had.
    """

    places: int = 1
    waiting: dict[int, _Key] = field(default_factory=dict)
    running: dict[int, str | None] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    _by_arrival: list[_Key] = field(default_factory=list)

    def queue(self, sequence: Sequence) -> None:
        key = self.waiting[sequence.handle] = (sequence.arrived_ps, sequence.handle)
        heappush(self._by_arrival, key)

    def earliest(self) -> _Key | None:
        """Return the key of the waiting sequence that came first."""
        while self._by_arrival and self.waiting.get(self._by_arrival[0][1]) != self._by_arrival[0]:
            heappop(self._by_arrival)
        return self._by_arrival[0] if self._by_arrival else None


class Watch:
    """Subscribes to a run's facts, and takes its requests as they end (`ended`).

    Args:
        level: that requests are held against.

    Attributes:
        num_admissions: sequences that entered a batch.
        num_choices: decisions that admitted some of the waiting sequences of a worker and left others.
        num_out_of_order: those of them in which one was left that had come before one that was admitted.
        most_waiting: at a worker, when some were admitted.
        most_running: at a worker.
        num_loads: of adapters onto a GPU, without those that failed.
    """

    reads_prompts = False

    def __init__(self, level: Level) -> None:
        self._level = level
        self.num_admissions = self.num_choices = self.num_out_of_order = 0
        self.most_waiting = self.most_running = self.num_loads = 0
        self._workers: dict[Member, _Worker] = {}
        self._has: dict[int, _Worker] = {}
        self._uses: list[Use] = []
        self._hash = blake2b(digest_size=7)
        self._open: tuple[Member, int, list[_Key]] | None = None
        self._rows: list[tuple[int, str, str, int, Served]] = []

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """What it wants to know."""
        return {
            Placed: self._placed,
            Refused: self._refused,
            Admitted: self._admitted,
            Preempted: self._preempted,
            LoadBegan: self._load_began,
            LoadEnded: self._load_ended,
            **dict.fromkeys((Cancelled, Dropped, Failed, Finished, Recalled), self._left),
        }

    def _note(self, kind: str, handle: int, at_ps: int, member: Member | None = None) -> None:
        self._hash.update(f"{kind}{handle},{at_ps},{'' if member is None else member.name};".encode())

    def _worker(self, member: Member) -> _Worker:
        worker = self._workers.get(member)
        if worker is None:
            worker = self._workers[member] = _Worker()
        return worker

    def _placed(self, fact: Placed, at_ps: int, _member: Any) -> None:  # noqa: ANN401  as Handler
        self._end_decision()
        handle = fact.sequence.handle
        self._note("placed", handle, at_ps, fact.member)
        self._gone(handle)  # from a worker that was lost
        worker = self._has[handle] = self._worker(fact.member)
        worker.queue(fact.sequence)

    def _refused(self, fact: Refused, at_ps: int, _member: Any) -> None:  # noqa: ANN401
        self._note("refused", fact.sequence.handle, at_ps)
        self._gone(fact.sequence.handle)

    def _admitted(self, fact: Admitted, at_ps: int, member: Member) -> None:
        sequence, worker = fact.sequence, self._worker(member)
        if self._open is None or self._open[:2] != (member, at_ps):
            self._end_decision()
            self._open = (member, at_ps, [])
            self.most_waiting = max(self.most_waiting, len(worker.waiting))
        self.num_admissions += 1
        self._note("admitted", sequence.handle, at_ps, member)
        worker.waiting.pop(sequence.handle, None)
        self._open[2].append((sequence.arrived_ps, sequence.handle))
        key = worker.running[sequence.handle] = None if sequence.adapter is None else sequence.adapter.key
        self.most_running = max(self.most_running, len(worker.running))
        if sequence.adapter is not None and key is not None:
            options, slots = member.replica.adapters.options, sequence.adapter.slots
            fit = options.max_loras
            if fit is None:
                fit = options.max_slots // slots if options.max_slots is not None and slots else _NO_LIMIT
            worker.places = max(worker.places, fit)
            self._use(worker, key, 1)

    def _end_decision(self) -> None:
        """See what a decision left waiting, once all that it admitted is known."""
        if self._open is None:
            return
        member, _, admitted = self._open
        self._open = None
        earliest = self._worker(member).earliest()
        if earliest is not None:
            self.num_choices += 1
            self.num_out_of_order += earliest < max(admitted)

    def _use(self, worker: _Worker, key: str, change: int) -> None:
        worker.uses.append((key, change))
        self._uses.append((key, change))

    def _leave_batch(self, worker: _Worker, handle: int) -> None:
        key = worker.running.pop(handle, None)
        if key is not None:
            self._use(worker, key, -1)

    def _preempted(self, fact: Preempted, at_ps: int, member: Member) -> None:
        self._end_decision()
        self._note("preempted", fact.sequence.handle, at_ps, member)
        worker = self._worker(member)
        self._leave_batch(worker, fact.sequence.handle)
        worker.queue(fact.sequence)

    def _left(self, fact: Any, at_ps: int, member: Member | None) -> None:  # noqa: ANN401
        self._end_decision()
        handle = fact.sequence.handle
        self._note(type(fact).__name__, handle, getattr(fact, "at_ps", at_ps), member)
        self._gone(handle)

    def _gone(self, handle: int) -> None:
        worker = self._has.pop(handle, None)
        if worker is not None:
            worker.waiting.pop(handle, None)
            self._leave_batch(worker, handle)

    def _load_began(self, _fact: LoadBegan, _at_ps: int, _member: Any) -> None:  # noqa: ANN401
        self.num_loads += 1

    def _load_ended(self, fact: LoadEnded, _at_ps: int, _member: Any) -> None:  # noqa: ANN401
        self.num_loads -= fact.failed

    # --- requests -------------------------------------------------------------------------------------------------

    def ended(self, request: SimulatedRequest) -> None:
        """Take a request that has ended."""
        finished_ps = request.finished_ps
        assert finished_ps is not None
        served = Served(
            request.sent_ps,
            request.first_admitted_ps,
            request.first_token_ps,
            request.last_token_ps or finished_ps,
            request.prompt_tokens,
            request.ending.output_tokens,
            request.output_tokens,
            self._level.is_kept(request),
        )
        adapter = "" if request.adapter is None else request.adapter.adapter_id
        self._rows.append((request.handle, request.tenant_id, adapter, request.sequence.priority, served))

    @property
    def has_tenants(self) -> bool:
        """Whether requests have tenants; if none has, adapters count as tenants."""
        return any(row[1] for row in self._rows)

    @property
    def tenants(self) -> dict[str, list[Served]]:
        """Requests by tenant, those with most requests first."""
        found: dict[str, list[Served]] = {}
        has_tenants = self.has_tenants
        for _, tenant, adapter, _, served in self._rows:
            found.setdefault(tenant if has_tenants else adapter, []).append(served)
        return dict(sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0])))

    @property
    def num_owners(self) -> int:
        """Different pairs of adapter and tenant."""
        return len({(adapter, tenant) for _, tenant, adapter, _, _ in self._rows})

    @property
    def num_priorities(self) -> int:
        """Different priorities of requests."""
        return len({priority for _, _, _, priority, _ in self._rows})

    def close(self) -> None:
        """Count the last decision; to be called when the run has ended."""
        self._end_decision()

    @property
    def digest(self) -> int:
        """A hash of all decisions."""
        return int.from_bytes(self._hash.digest())

    @property
    def workload_digest(self) -> int:
        """A hash of the requests: lengths, adapters and tenants, in order of their handles."""
        rows = sorted((*row[:4], row[4].prompt_tokens, row[4].asked_tokens) for row in self._rows)
        return int.from_bytes(blake2b(repr(rows).encode(), digest_size=7).digest())

    # --- adapters -------------------------------------------------------------------------------------------------

    def fewest_loads(self, *, anywhere: bool) -> int:
        """Return the fewest loads for these admissions: each on its worker, or with all workers' places together."""
        if not anywhere:
            return sum(fewest_loads(worker.uses, worker.places) for worker in self._workers.values())
        return fewest_loads(self._uses, sum(worker.places for worker in self._workers.values()))

    @property
    def num_workers(self) -> int:
        """Workers that got requests."""
        return len(self._workers)
