"""The cluster under a virtual clock: the same core and the same mock GPU, without a wall clock, a socket or a thread.

Between arrivals workers do not meet, so one heap of their next boundaries drives them all; each jumps from plan to plan
(`simulator.worker`). The law of the core, commit(k) equals commit(j), plan, commit(k - j), makes that equal to running
every step.

Order at one time: arrivals first, then cancels, deadlines and faults in the order given, then the workers' boundaries
in order of attaching. So an arrival at a boundary is seen there, as it is live.

Schedulers (shards) share nothing but the clock: a request belongs to the one that `choose_shard` names, as a router
does it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush

from lorrery.scheduler.core.placements.base import Placement
from lorrery.scheduler.core.plan import (
    Admitted,
    Cancelled,
    Dropped,
    DropReason,
    Event,
    Finished,
    FirstToken,
    Idle,
    Preempted,
)
from lorrery.scheduler.core.sequence import Sequence as CoreSequence
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.stretch import Observer, Stretch
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND
from lorrery.worker.device.steptime import StepTimeModel

Refuse = Callable[[SimulatedRequest], tuple[str, str] | None]
"""Says that a request may not come in (its outcome, why); None: it may."""
Follow = Callable[[SimulatedRequest, int], SimulatedRequest | None]
"""Says which request its client sends next, given one that has ended and the time; None: no further one."""


class Simulation:
    """Runs requests through workers.

    Args:
        workers: in order of attaching.
        placement: who gets a request; with several shards one each, in order.
        one_step: plan before every step, as the oracle does; slow.
        refuse: checks requests as they arrive.
        choose_shard: index of the scheduler that gets a request; needed with several.
        timeout_ps: requests not over so long after their arrival are cancelled.
        worker_wait_ps: how long a request waits while its scheduler has no worker.
        observers: told of what runs, see `observe`.

    Attributes:
        now_ps: the clock.
        shards: the workers that are attached to each scheduler.
    """

    def __init__(
        self,
        workers: Iterable[SimulatedWorker],
        placement: Placement | Sequence[Placement],
        *,
        one_step: bool = False,
        refuse: Refuse | None = None,
        choose_shard: Callable[[SimulatedRequest], int] | None = None,
        timeout_ps: int | None = None,
        worker_wait_ps: int = 30 * PS_PER_SECOND,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.workers = list(workers)
        self._observer: Observer | None = None
        for order, worker in enumerate(self.workers):
            worker.order = order
        self._placements = placement if isinstance(placement, Sequence) else [placement]
        self.shards: list[list[SimulatedWorker]] = [[] for _ in self._placements]
        for worker in self.workers:
            self.shards[worker.shard].append(worker)
        self.now_ps = 0
        self._one_step = one_step
        self._refuse = refuse
        self._choose_shard = choose_shard
        self._timeout_ps = None if timeout_ps is None or timeout_ps >= NEVER else timeout_ps
        self._worker_wait_ps = worker_wait_ps
        self._requests: dict[int, SimulatedRequest] = {}
        self._worker_of: dict[int, SimulatedWorker] = {}
        self._unplaced: list[dict[int, tuple[int, SimulatedRequest]]] = [{} for _ in self._placements]  # since when
        self._boundaries: list[tuple[int, int, int]] = []  # (time, order of the worker, version)
        self._new_pace: dict[int, StepTimeModel] = {}  # by the worker's order, until its next boundary
        self._timed: list[tuple[int, int, Callable[[], None]]] = []  # (time, number, what)
        self._num_timed = 0
        self._deadlines: deque[tuple[int, SimulatedRequest]] = deque()  # in order: all have the same time
        self._ended: list[SimulatedRequest] = []
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

    def num_waiting(self, shard: int) -> int:
        """Return how many requests of a scheduler wait, for a batch or for a worker."""
        return len(self._unplaced[shard]) + sum(worker.replica.num_waiting for worker in self.shards[shard])

    def close(self) -> list[SimulatedRequest]:
        """End every request that is still open, as interrupted; the simulation is of no more use."""
        still_open = list(self._requests.values())
        for request in still_open:
            request.outcome, request.finished_ps = "interrupted", self.now_ps
            request.output_tokens = self._tokens_given(request)
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
        if self._choose_shard is not None:
            request.shard = self._choose_shard(request)
        if self._refuse is not None and (refusal := self._refuse(request)) is not None:
            self._close(request, *refusal)
            return
        self._requests[request.handle] = request
        if self._timeout_ps is not None:
            self._deadlines.append((self.now_ps + self._timeout_ps, request))
        self._place(request)

    def _place(self, request: SimulatedRequest) -> None:
        """Give a request to a worker of its scheduler, now or when there is one."""
        workers = self.shards[request.shard]
        fitting = [worker for worker in workers if worker.replica.why_never(request) is None]
        if len(fitting) == 1:
            worker = fitting[0]
            if len(workers) > 1:  # a placement may remember what it chose
                self._placements[request.shard].place(request, [worker.candidate])
        elif fitting:
            worker = self._choose(request, fitting)
        else:
            self._wait_or_refuse(request, workers)
            return
        self._worker_of[request.handle] = worker
        replica = worker.replica
        heeded = replica.arrival_matters(again=request.arrived_ps < self.now_ps)
        replica.submit(request, self.now_ps)
        self._nudge(worker, heeded=heeded)

    def _choose(self, request: SimulatedRequest, fitting: list[SimulatedWorker]) -> SimulatedWorker:
        for worker in fitting:
            worker.show(self.now_ps)
        candidates = [worker.candidate for worker in fitting]
        chosen = self._placements[request.shard].place(request, candidates).candidate
        return fitting[candidates.index(chosen)]

    def _wait_or_refuse(self, request: SimulatedRequest, workers: list[SimulatedWorker]) -> None:
        if workers:
            del self._requests[request.handle]
            self._close(request, "refused", workers[0].replica.why_never(request) or "")
            return
        self._unplaced[request.shard][request.handle] = self.now_ps, request
        self.at(self.now_ps + self._worker_wait_ps, partial(self._wait_in_vain, request, self.now_ps))

    def _wait_in_vain(self, request: SimulatedRequest, since_ps: int) -> None:
        unplaced = self._unplaced[request.shard]
        if unplaced.get(request.handle, (None, request))[0] == since_ps:
            del unplaced[request.handle], self._requests[request.handle]
            self._close(request, "no worker", "no worker has attached")

    def cancel(self, handle: int) -> None:
        """Withdraw a request now; ignored if it is over."""
        request = self._requests.get(handle)
        if request is None:
            return
        worker = self._worker_of.get(handle)
        if request.finished_ps is None:  # to its client; the core lets go of it at the next boundary
            request.finished_ps, request.output_tokens = self.now_ps, self._tokens_given(request)
        if worker is not None:
            worker.replica.cancel(handle, self.now_ps)
            self._nudge(worker, heeded=True)
        else:
            del self._unplaced[request.shard][handle], self._requests[handle]
            self._close(request, "timed out" if request.detail else "cancelled", request.detail)

    def _tokens_given(self, request: SimulatedRequest) -> int:
        worker = self._worker_of.get(request.handle)
        return request.produced_tokens if worker is None else worker.tokens_given(request, self.now_ps)

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
        shard = self.shards[worker.shard]
        if worker not in shard:
            return
        worker.catch_up(self.now_ps)
        shard.remove(worker)
        worker.version += 1
        worker.plan, worker.end_ps = None, None
        unfinished, events = worker.replica.lose(max(self.now_ps, worker.boundary_ps))
        worker.gpu.clear()
        self._handle(worker, events)
        for sequence in unfinished:
            request = self._requests[sequence.handle]
            if self._observer is not None:
                self._observer.requeued(worker.name, request)
            del self._worker_of[sequence.handle]
            self._place(request)
        if self._observer is not None:
            self._observer.lost(worker.name)

    def attach(self, worker: SimulatedWorker) -> None:
        """Let a worker that was lost come back now, with nothing; it gets what waits for one."""
        shard = self.shards[worker.shard]
        if worker in shard:
            return
        worker.renew(self.now_ps)
        shard.append(worker)
        waiting, self._unplaced[worker.shard] = self._unplaced[worker.shard], {}
        for _, request in waiting.values():
            self._place(request)

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
        decision = worker.replica.plan(at_ps)
        worker.totals.num_plans += 1
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
            if isinstance(event, FirstToken):
                continue  # its sequence tells
            if isinstance(event, Finished):
                request = self._end(event.sequence, worker)
                request.outcome, request.reason = "finished", event.reason
                request.output_tokens, request.finished_ps = event.output_tokens, event.at_ps
                self._ended.append(request)
            elif isinstance(event, Admitted):
                request = self._requests[event.sequence.handle]
                if request.first_admitted_ps is None:
                    request.first_admitted_ps = request.admitted_ps
                    request.first_cached_tokens = min(request.cached_tokens, request.prompt_tokens)
            elif isinstance(event, Cancelled):
                request = self._end(event.sequence, worker)
                if self._observer is not None:
                    self._observer.left(worker.name, request.handle)
                outcome = "timed out" if request.detail else "cancelled"
                self._close(request, outcome, request.detail)
            elif isinstance(event, Preempted):
                if self._observer is not None:
                    self._observer.requeued(worker.name, self._requests[event.sequence.handle])
            elif isinstance(event, Dropped):
                self._close(self._end(event.sequence, worker), "dropped", _DROPPED[event.reason])

    def _end(self, sequence: CoreSequence, worker: SimulatedWorker) -> SimulatedRequest:
        handle = sequence.handle
        del self._worker_of[handle]
        request = self._requests.pop(handle)
        request.worker = worker.name
        return request

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

    def ran(self, stretch: Stretch) -> None:
        for observer in self._observers:
            observer.ran(stretch)

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


_DROPPED = {
    DropReason.SERVICE_LEVEL: "dropped: the service level can no longer be met; try later",
    DropReason.ADAPTER_LOAD: "its adapter could not be loaded; try later",
}
