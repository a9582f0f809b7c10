"""The cluster under a virtual clock: the same core and the same mock GPU, without a wall clock, a socket or a thread.

Who is let in, where a request goes and when a wait is over is decided in `scheduler.core.cluster`, as it is live; this
module carries time. Between arrivals workers do not meet, so one heap of their next boundaries drives them all; each
jumps from plan to plan (`simulator.worker`). By the law of the core, commit(k) equals commit(j), plan, commit(k - j),
that is equal to running every step.

Order at one time: arrivals first, then cancels, deadlines and faults in the order given, then the workers' boundaries
in order of attaching. So an arrival at a boundary is seen there, as it is live.

Schedulers (shards) share nothing but the clock: a request belongs to the one that `choose_shard` names, as a router
does it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush

from lorrery.chassis.faults import NO_FAULTS
from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_events import ClusterEvent, Placed, Refused, Withdrawn
from lorrery.scheduler.core.door import LETS_ALL_IN, ClusterRules
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.base import Placement
from lorrery.scheduler.core.plan import (
    Admitted,
    Cancelled,
    Dropped,
    Event,
    Failed,
    Finished,
    FirstToken,
    Idle,
    Preempted,
    Recalled,
)
from lorrery.scheduler.core.refusals import Refusal, RefusalReason
from lorrery.scheduler.core.sequence import Sequence as CoreSequence
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.request_faults import RequestFaultInjector
from lorrery.simulator.step_span import Observer, StepSpan
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.steptime import StepTimeModel

Follow = Callable[[SimulatedRequest, int], SimulatedRequest | None]
"""Says which request its client sends next, given one that has ended and the time; None: no further one."""


class Simulation:
    """Runs requests through workers.

    Args:
        workers: in order of attaching.
        placement: who gets a request; with several shards one each, in order.
        rules: of each scheduler: what it lets in, and how long a request waits while it has no worker.
        one_step: plan before every step, as the oracle does; slow.
        choose_shard: index of the scheduler that gets a request; needed with several.
        timeout_ps: requests not over so long after their arrival are cancelled.
        observers: told of what runs, see `observe`.

    Attributes:
        now_ps: the clock.
    """

    def __init__(
        self,
        workers: Iterable[SimulatedWorker],
        placement: Placement | Sequence[Placement],
        *,
        rules: ClusterRules = LETS_ALL_IN,
        one_step: bool = False,
        choose_shard: Callable[[SimulatedRequest], int] | None = None,
        timeout_ps: int | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.workers = list(workers)
        self._observer: Observer | None = None
        for order, worker in enumerate(self.workers):
            worker.order = order
        placements = placement if isinstance(placement, Sequence) else [placement]
        self._cores = [
            ClusterCore(one, rules, bring_up_to_date=self._show, catch_up=self._catch_up) for one in placements
        ]
        self._worker_at: dict[Member, SimulatedWorker] = {}
        self.now_ps = 0
        self._one_step = one_step
        self._choose_shard = choose_shard
        self._timeout_ps = None if timeout_ps is None or timeout_ps >= NEVER else timeout_ps
        self._requests: dict[int, SimulatedRequest] = {}
        self._boundaries: list[tuple[int, int, int]] = []  # (time, order of the worker, version)
        self._new_pace: dict[int, StepTimeModel] = {}  # by the worker's order, until its next boundary
        self._timed: list[tuple[int, int, Callable[[], None]]] = []  # (time, number, what)
        self._num_timed = 0
        self._deadlines: deque[tuple[int, SimulatedRequest]] = deque()  # in order: all have the same time
        self._ended: list[SimulatedRequest] = []
        self._injector: RequestFaultInjector | None = None
        self._delayed: set[int] = set()  # handles that no scheduler has heard of yet
        self._looks_for_moves = [False for _ in self._cores]
        self._waits_until_ps: list[int | None] = [None for _ in self._cores]  # what the clock looks at already
        for worker in self.workers:
            self._attach(worker)
        self.observe(observers)

    @property
    def num_open(self) -> int:
        """Requests that have arrived and are not over."""
        return len(self._requests)

    def observe(self, observers: Sequence[Observer]) -> None:
        """Tell these, and nobody else, of what runs from now on."""
        self._observer = _together(observers)
        if self._observer is not None:
            self._observer.begin(self.now_ps)
        for worker in self.workers:
            worker.observer = self._observer

    def inject(self, injector: RequestFaultInjector) -> None:
        """Let requests that arrive from now on meet its faults."""
        self._injector = injector

    @property
    def num_moved(self) -> int:
        """Requests that have moved to another worker while they waited."""
        return sum([core.num_moved for core in self._cores])

    def num_waiting(self, shard: int) -> int:
        """Return how many requests of a scheduler wait, for a batch or for a worker."""
        return self._cores[shard].num_waiting

    def close(self) -> list[SimulatedRequest]:
        """End every request that is still open, as interrupted; the simulation is of no more use."""
        still_open = list(self._requests.values())
        for request in still_open:
            request.outcome, request.finished_ps = "interrupted", self.now_ps
            request.output_tokens = self._tokens_given(request, self._worker_of(request))
        self._requests.clear()
        return still_open

    def at(self, at_ps: int, happen: Callable[[], None]) -> None:
        """Let something happen at a time: a cancel, a fault."""
        heappush(self._timed, (at_ps, self._num_timed, happen))
        self._num_timed += 1

    def run(
        self,
        arrivals: Iterable[tuple[int, SimulatedRequest]],
        cancels: Iterable[tuple[int, int]] = (),
        *,
        follow: Follow | None = None,
    ) -> Iterator[SimulatedRequest]:
        """Run until nothing is left to do; yield each request as it ends.

        Args:
            arrivals: (time in picoseconds, request), in order of time.
            cancels: (time in picoseconds, handle).
            follow: a closed loop's next requests, which arrive as one ends.
        """
        for at_ps, handle in cancels:
            self.at(at_ps, partial(self.cancel, handle))
        coming = iter(arrivals)
        arrival = next(coming, None)
        arrival_ps = NEVER if arrival is None else arrival[0]
        boundaries, timed, deadlines = self._boundaries, self._timed, self._deadlines
        ended, workers = self._ended, self.workers
        while True:
            while boundaries and workers[boundaries[0][1]].version != boundaries[0][2]:
                heappop(boundaries)
            boundary_ps = boundaries[0][0] if boundaries else NEVER
            timed_ps = timed[0][0] if timed else NEVER
            while deadlines and deadlines[0][1].outcome is not None:
                deadlines.popleft()
            if deadlines and deadlines[0][0] < timed_ps:
                timed_ps = deadlines[0][0]
            if arrival is not None and arrival_ps <= boundary_ps and arrival_ps <= timed_ps:
                self.now_ps = arrival_ps
                self._arrive(arrival[1])
                arrival = next(coming, None)
                if arrival is not None:
                    arrival_ps = arrival[0]
            elif timed_ps <= boundary_ps:
                if timed_ps == NEVER:
                    return
                self.now_ps = timed_ps
                if timed and timed[0][0] == timed_ps:
                    heappop(timed)[2]()
                else:
                    self._time_out(deadlines.popleft()[1])
            else:
                self.now_ps = boundary_ps
                self._at_boundary(workers[heappop(boundaries)[1]], boundary_ps)
            if ended:
                if follow is not None:
                    self._send_next(follow)
                yield from ended
                ended.clear()

    def _send_next(self, follow: Follow) -> None:
        for request in self._ended:
            following = follow(request, self.now_ps)
            if following is not None:
                self.at(self.now_ps, partial(self._arrive, following))

    # --- from outside -----------------------------------------------------------------------------------------------

    def _arrive(self, request: SimulatedRequest) -> None:
        if self._injector is not None and self._injector.choose(request, self.now_ps) is not NO_FAULTS:
            self._delay(request)
        else:
            self._submit(request)

    def _delay(self, request: SimulatedRequest) -> None:
        self._requests[request.handle] = request
        self._delayed.add(request.handle)
        request.arrived_ps = self.now_ps + request.faults.delay_ps
        self.at(request.arrived_ps, partial(self._let_through, request))
        if self._timeout_ps is not None:
            self._deadlines.append((self.now_ps + self._timeout_ps, request))

    def _let_through(self, request: SimulatedRequest) -> None:
        if request.handle not in self._delayed:
            return  # its client no longer waits
        self._delayed.remove(request.handle)
        if (refusal := request.faults.refusal) is not None:
            self._close(self._requests.pop(request.handle), "faulted", refusal.text)
        else:
            self._submit(request)

    def _submit(self, request: SimulatedRequest) -> None:
        if self._choose_shard is not None:
            request.shard = self._choose_shard(request)
        self._requests[request.handle] = request
        events = self._cores[request.shard].submit(request.sequence, self.now_ps)
        for event in events:
            if isinstance(event, Placed):
                self._nudge(self._worker_at[event.member], heeded=event.matters)
            else:
                self._carry_out(events)
        if self._timeout_ps is not None and request.outcome is None and request.faults is NO_FAULTS:
            self._deadlines.append((self.now_ps + self._timeout_ps, request))
        if not events:
            self._wait_for_worker(request.shard)

    def _carry_out(self, events: Iterable[ClusterEvent]) -> None:
        """Let the workers know what their scheduler has decided, and the clients who was refused."""
        for event in events:
            if isinstance(event, Placed):
                self._nudge(self._worker_at[event.member], heeded=event.matters)
            elif isinstance(event, Refused):
                self._refuse(self._requests.pop(event.sequence.handle), event.refusal)
            elif isinstance(event, Withdrawn):
                request, worker = self._requests[event.sequence.handle], self._worker_at[event.member]
                self._leave(request, worker)
                self._nudge(worker, heeded=True)
            else:
                request = self._requests.pop(event.sequence.handle)
                self._leave(request, None)
                self._close(request, "timed out" if request.detail else "cancelled", request.detail)

    def _show(self, member: Member, at_ps: int) -> None:
        self._worker_at[member].show(at_ps)

    def _wait_for_worker(self, shard: int) -> None:
        """Look again at a scheduler's requests without a worker when the first of their waits is over."""
        until_ps = self._cores[shard].until_ps
        if until_ps is not None and until_ps != self._waits_until_ps[shard]:
            self._waits_until_ps[shard] = until_ps
            self.at(until_ps, partial(self._wait_is_over, shard))

    def _wait_is_over(self, shard: int) -> None:
        core = self._cores[shard]
        while (until_ps := core.until_ps) is not None and until_ps <= self.now_ps:
            self._carry_out(core.expire(self.now_ps))
        self._wait_for_worker(shard)

    def _place(self, shard: int, events: Iterable[ClusterEvent]) -> None:
        """Carry out what was decided of workers, and place whatever else there is to place again."""
        self._carry_out(events)
        core = self._cores[shard]
        while core.is_placing:
            self._carry_out(core.place_again(self.now_ps))
        self._wait_for_worker(shard)
        self._look_for_moves(shard)

    # --- balance ----------------------------------------------------------------------------------------------------

    def _look_for_moves(self, shard: int) -> None:
        """Let a scheduler balance what waits once all that happens at this moment has happened."""
        if not self._looks_for_moves[shard] and self._cores[shard].may_move:
            self._looks_for_moves[shard] = True
            self.at(self.now_ps + 1, partial(self._balance, shard))

    def _balance(self, shard: int) -> None:
        self._looks_for_moves[shard] = False
        for donor in dict.fromkeys(move.donor for move in self._cores[shard].balance(self.now_ps)):
            self._nudge(self._worker_at[donor], heeded=True)

    def _catch_up(self, member: Member, at_ps: int) -> None:
        self._worker_at[member].catch_up(at_ps)

    def cancel(self, handle: int) -> None:
        """Withdraw a request now; ignored if it is over."""
        request = self._requests.get(handle)
        if request is None:
            return
        if handle in self._delayed:
            self._delayed.remove(handle)
            self._close(self._requests.pop(handle), "timed out" if request.detail else "cancelled", request.detail)
        else:
            self._carry_out(self._cores[request.shard].cancel(handle, self.now_ps))

    def _leave(self, request: SimulatedRequest, worker: SimulatedWorker | None) -> None:
        """Let a request's client go; the core lets go of it at the next boundary."""
        if request.finished_ps is None:
            request.finished_ps, request.output_tokens = self.now_ps, self._tokens_given(request, worker)

    def _tokens_given(self, request: SimulatedRequest, worker: SimulatedWorker | None) -> int:
        return request.produced_tokens if worker is None else worker.tokens_given(request, self.now_ps)

    def _worker_of(self, request: SimulatedRequest) -> SimulatedWorker | None:
        for worker in self.workers:
            if worker.attached and request.handle in worker.member.sequences:
                return worker
        return None

    def _time_out(self, request: SimulatedRequest) -> None:
        request.detail = "deadline exceeded"
        self.cancel(request.handle)

    def _nudge(self, worker: SimulatedWorker, *, heeded: bool) -> None:
        if worker.plan is None:
            self._schedule(worker, max(self.now_ps, worker.boundary_ps))
        elif heeded and (boundary_ps := worker.interrupt(self.now_ps)) is not None:
            self._schedule(worker, boundary_ps)

    def _schedule(self, worker: SimulatedWorker, at_ps: int) -> None:
        worker.version += 1
        worker.end_ps = at_ps
        heappush(self._boundaries, (at_ps, worker.order, worker.version))

    # --- workers that come and go -----------------------------------------------------------------------------------

    def lose(self, worker: SimulatedWorker) -> None:
        """Let a worker die now; what it had is queued again elsewhere. Ignored if it is gone."""
        if not worker.attached:
            return
        member = worker.member
        worker.catch_up(self.now_ps)
        worker.version += 1
        worker.attached, worker.plan, worker.end_ps = False, None, None
        gave_back, events = self._cores[worker.shard].lose(member, self.now_ps, worker.boundary_ps)
        del self._worker_at[member]
        worker.gpu.clear()
        self._handle(worker, gave_back.events)
        if self._observer is not None:
            for sequence in gave_back.sequences:
                self._observer.requeued(worker.name, self._requests[sequence.handle])
        self._place(worker.shard, events)
        if self._observer is not None:
            self._observer.lost(worker.name)

    def attach(self, worker: SimulatedWorker) -> None:
        """Let a worker that was lost come back now, with nothing; it gets what waits for one."""
        if worker.attached:
            return
        worker.renew(self.now_ps)
        self._place(worker.shard, self._attach(worker))

    def _attach(self, worker: SimulatedWorker) -> list[ClusterEvent]:
        worker.attached, self._worker_at[worker.member] = True, worker
        return self._cores[worker.shard].attach(worker.member, self.now_ps)

    def change_pace(self, worker: SimulatedWorker, step_time: StepTimeModel) -> None:
        """Let a worker's steps take what another model says, from its next boundary on."""
        self._new_pace[worker.order] = step_time
        self._nudge(worker, heeded=True)

    # --- boundaries -------------------------------------------------------------------------------------------------

    def _at_boundary(self, worker: SimulatedWorker, at_ps: int) -> None:
        plan = worker.plan
        if plan is not None:
            events = worker.finish(plan, at_ps, self._requests)
            if events:
                self._handle(worker, events)
        if self._new_pace and (step_time := self._new_pace.pop(worker.order, None)) is not None:
            worker.use(step_time)
        worker.boundary_ps = at_ps
        decision = worker.member.plan(at_ps)
        worker.totals.num_plans += 1
        if worker.member.changed:
            worker.member.changed = False
            self._look_for_moves(worker.shard)
        if decision.events:
            self._handle(worker, decision.events)
        if decision.leaves:
            for sequence in decision.leaves:
                worker.gpu.leave(sequence.handle)
        if not isinstance(decision, Idle):
            self._schedule(worker, worker.start(decision, at_ps, self._requests, one_step=self._one_step))
        elif decision.until_ps is not None:
            self._schedule(worker, max(at_ps, decision.until_ps))
        else:
            worker.end_ps = None
            worker.version += 1

    def _handle(self, worker: SimulatedWorker, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, (FirstToken, Admitted)):
                continue  # its sequence tells
            if isinstance(event, Finished):
                request = self._end(event.sequence, worker)
                request.outcome, request.reason = "finished", event.reason
                request.output_tokens, request.finished_ps = event.output_tokens, event.at_ps
                if request.faults is NO_FAULTS:
                    self._ended.append(request)
                else:
                    self._end_with_faults(request)
            elif isinstance(event, Cancelled):
                request = self._end(event.sequence, worker)
                if self._observer is not None:
                    self._observer.left(worker.name, request.handle)
                outcome = "timed out" if request.detail else "cancelled"
                self._close(request, outcome, request.detail)
            elif isinstance(event, Recalled):
                self._carry_out(self._cores[worker.shard].take_recalled(event, worker.member, self.now_ps))
            elif isinstance(event, Preempted):
                if self._observer is not None:
                    self._observer.requeued(worker.name, self._requests[event.sequence.handle])
            elif isinstance(event, Dropped):
                self._refuse(self._end(event.sequence, worker), refusals.dropped(event))
            elif isinstance(event, Failed):
                if self._observer is not None:
                    self._observer.left(worker.name, event.sequence.handle)
                self._refuse(self._end(event.sequence, worker), refusals.raised(event.message))

    def _end_with_faults(self, request: SimulatedRequest) -> None:
        """End a request whose stream a fault may have cut, or still holds back."""
        assert self._injector is not None
        assert request.finished_ps is not None
        cut, released_ps = request.faults.cut, self._injector.released_ps(request)
        if cut is not None and request.output_tokens >= cut.after:
            request.outcome, request.reason, request.detail = "faulted", None, cut.text
            request.output_tokens = cut.after
        last_ps = request.finished_ps if request.last_token_ps is None else request.last_token_ps
        if released_ps <= last_ps:
            self._ended.append(request)
            return
        request.last_token_ps = released_ps
        request.finished_ps = max(request.finished_ps, released_ps)
        sent_ps = request.arrived_ps - request.faults.delay_ps
        if self._timeout_ps is not None and request.finished_ps > sent_ps + self._timeout_ps:
            request.finished_ps, request.reason = sent_ps + self._timeout_ps, None
            request.outcome, request.detail = "timed out", "deadline exceeded"
        self.at(request.finished_ps, partial(self._ended.append, request))

    def _end(self, sequence: CoreSequence, worker: SimulatedWorker) -> SimulatedRequest:
        request = self._requests.pop(sequence.handle)
        request.worker = worker.name
        return request

    def _refuse(self, request: SimulatedRequest, refusal: Refusal) -> None:
        self._close(request, _OUTCOME[refusal.reason], refusal.message)

    def _close(self, request: SimulatedRequest, outcome: str, detail: str = "") -> None:
        request.outcome, request.detail = outcome, detail
        if request.finished_ps is None:
            request.finished_ps = self.now_ps
        self._ended.append(request)


class _Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def begin(self, start_ps: int) -> None:
        for observer in self._observers:
            observer.begin(start_ps)

    def ran(self, span: StepSpan) -> None:
        for observer in self._observers:
            observer.ran(span)

    def left(self, worker: str, handle: int) -> None:
        for observer in self._observers:
            observer.left(worker, handle)

    def requeued(self, worker: str, request: SimulatedRequest) -> None:
        for observer in self._observers:
            observer.requeued(worker, request)

    def lost(self, worker: str) -> None:
        for observer in self._observers:
            observer.lost(worker)


def _together(observers: Sequence[Observer]) -> Observer | None:
    if len(observers) > 1:
        return _Observers(observers)
    return observers[0] if observers else None


_OUTCOME = {
    RefusalReason.INVALID: "refused",
    RefusalReason.NEVER_FITS: "refused",
    RefusalReason.UNKNOWN_ADAPTER: "unknown adapter",
    RefusalReason.QUEUE_FULL: "queue full",
    RefusalReason.QUOTA_EXCEEDED: "queue full",
    RefusalReason.NO_WORKER: "no worker",
    RefusalReason.DRAINING: "draining",
    RefusalReason.SLO_UNATTAINABLE: "dropped",
    RefusalReason.ADAPTER_LOAD: "dropped",
    RefusalReason.WORKERS_LOST: "failed",
    RefusalReason.INTERNAL: "failed",
}
