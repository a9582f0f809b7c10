"""The cluster under a virtual clock: the same core and the same mock GPU, without a wall clock, a socket or a thread.

A worker's plan runs in one jump to its last step, or to the first boundary at or after an event that it heeds; the law
of the core (commit(k) equals commit(j), plan, commit(k - j)) makes that equal to running every step. Between arrivals
the workers do not meet, so one heap of next boundaries drives them all.

Order at one time: arrivals and cancels first, in the order given, then the workers' boundaries, in order of attaching.
So an arrival at a boundary is seen there, as it is live.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from scheduler.core.placements.base import Candidate, Placement
from scheduler.core.plan import (
    Admitted,
    Cancelled,
    Dropped,
    EndReason,
    Event,
    Finished,
    FirstToken,
    Idle,
    Plan,
    Preempted,
    Ran,
)
from scheduler.core.replica import Replica
from scheduler.core.sequence import Sequence
from worker.device.gpu import MockGpu, PrefillWork
from worker.device.output import FinishReason
from worker.device.rows import DeviceSequence

END_REASON = {
    FinishReason.EOS: EndReason.EOS,
    FinishReason.STOP: EndReason.STOP,
    FinishReason.LENGTH: EndReason.LENGTH,
}


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request: what comes in, and what became of it.

    Attributes:
        sequence: as the core sees it.
        device: as the GPU sees it, its hidden end in it, given what was produced before.
        outcome: "finished", "cancelled", "dropped" or "refused"; None while it lives.
    """

    sequence: Sequence
    device: Callable[[int], DeviceSequence]
    outcome: str | None = None
    reason: EndReason | None = None
    admitted_ps: int | None = None
    first_token_ps: int | None = None
    finished_ps: int | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    worker: str = ""


@dataclass(slots=True)
class Totals:
    """What a run counted."""

    num_steps: int = 0
    num_plans: int = 0
    busy_ps: int = 0
    end_ps: int = 0


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One worker: its replica, its GPU, and the plan that runs.

    Attributes:
        silent: sequences whose last step gives no token (llm-mock).
    """

    name: str
    replica: Replica
    gpu: MockGpu
    order: int = 0
    plan: Plan | None = None
    start_ps: int = 0
    steps: int = 0
    end_ps: int | None = None
    boundary_ps: int = 0
    version: int = 0
    silent: set[int] = field(default_factory=set)
    totals: Totals = field(default_factory=Totals)


class Simulation:
    """Runs requests through workers.

    Args:
        workers: in order of attaching.
        placement: who gets a request.
        one_step: plan before every step, as the oracle does; slow.
    """

    def __init__(self, workers: Iterable[SimulatedWorker], placement: Placement, *, one_step: bool = False) -> None:
        self.workers = list(workers)
        for order, worker in enumerate(self.workers):
            worker.order = order
        self._placement = placement
        self._one_step = one_step
        self._requests: dict[int, SimulatedRequest] = {}
        self._worker_of: dict[int, SimulatedWorker] = {}
        self._boundaries: list[tuple[int, int, int]] = []  # (time, order of the worker, version)

    def run(
        self, arrivals: Iterable[tuple[int, SimulatedRequest]], cancels: Iterable[tuple[int, int]] = ()
    ) -> Iterator[SimulatedRequest]:
        """Run until nothing is left to do; yield each request as it ends.

        Args:
            arrivals: (time in picoseconds, request), in order of time.
            cancels: (time in picoseconds, handle), in order of time.
        """
        coming = iter(arrivals)
        leaving = iter(cancels)
        arrival, cancel = next(coming, None), next(leaving, None)
        ended: list[SimulatedRequest] = []
        while True:
            boundary_ps = self._next_boundary_ps()
            next_ps = min((e[0] for e in (arrival, cancel) if e is not None), default=None)
            if next_ps is not None and (boundary_ps is None or next_ps <= boundary_ps):
                if arrival is not None and arrival[0] == next_ps:
                    self._arrive(*arrival, ended)
                    arrival = next(coming, None)
                else:
                    assert cancel is not None
                    self._cancel(*cancel)
                    cancel = next(leaving, None)
            elif boundary_ps is not None:
                _, order, _ = heappop(self._boundaries)
                self._at_boundary(self.workers[order], boundary_ps, ended)
            else:
                return
            yield from ended
            ended.clear()

    def _next_boundary_ps(self) -> int | None:
        heap = self._boundaries
        while heap and self.workers[heap[0][1]].version != heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else None

    # --- from outside -----------------------------------------------------------------------------------------------

    def _arrive(self, at_ps: int, request: SimulatedRequest, ended: list[SimulatedRequest]) -> None:
        sequence = request.sequence
        candidates = [
            Candidate(worker.name, worker.replica)
            for worker in self.workers
            if worker.replica.why_never(sequence) is None
        ]
        if not candidates:
            request.outcome = "refused"
            ended.append(request)
            return
        if len(candidates) > 1:
            for worker in self.workers:
                self._catch_up(worker, at_ps)
        chosen = self._placement.place(sequence, candidates).candidate.name
        worker = next(worker for worker in self.workers if worker.name == chosen)
        self._requests[sequence.handle] = request
        self._worker_of[sequence.handle] = worker
        heeded = worker.replica.arrival_matters()
        worker.replica.submit(sequence, at_ps)
        self._nudge(worker, at_ps, heeded=heeded)

    def _catch_up(self, worker: SimulatedWorker, at_ps: int) -> None:
        """Commit the steps of the running plan that have ended before now, so that placement sees the present state."""
        if worker.plan is None or worker.steps == 1:
            return
        done = worker.gpu.steps_to_cover(at_ps - worker.start_ps, worker.steps) - 1
        if done:
            duration_ps, finished = worker.gpu.skip(done)
            assert not finished
            worker.start_ps += duration_ps
            worker.steps -= done
            worker.totals.num_steps += done
            worker.totals.busy_ps += duration_ps
            events = worker.replica.commit(worker.plan, Ran(done, worker.start_ps))
            assert not events

    def _cancel(self, at_ps: int, handle: int) -> None:
        worker = self._worker_of.get(handle)
        if worker is not None:
            worker.replica.cancel(handle, at_ps)
            self._nudge(worker, at_ps, heeded=True)

    def _nudge(self, worker: SimulatedWorker, at_ps: int, *, heeded: bool) -> None:
        if worker.plan is None:
            self._schedule(worker, max(at_ps, worker.boundary_ps))
        elif heeded and worker.steps > 1 and worker.end_ps is not None and worker.end_ps > at_ps:
            worker.steps = worker.gpu.steps_to_cover(at_ps - worker.start_ps, worker.steps)
            self._schedule(worker, worker.start_ps + worker.gpu.total_ps(worker.steps))

    def _schedule(self, worker: SimulatedWorker, at_ps: int) -> None:
        worker.version += 1
        worker.end_ps = at_ps
        heappush(self._boundaries, (at_ps, worker.order, worker.version))

    # --- boundaries -------------------------------------------------------------------------------------------------

    def _at_boundary(self, worker: SimulatedWorker, at_ps: int, ended: list[SimulatedRequest]) -> None:
        if worker.plan is not None:
            self._commit(worker, worker.plan, at_ps, ended)
        worker.boundary_ps = at_ps
        decision = worker.replica.plan(at_ps)
        worker.totals.num_plans += 1
        self._handle(worker, decision.events, ended)
        for sequence in decision.leaves:
            worker.gpu.leave(sequence.handle)
        if isinstance(decision, Idle):
            worker.plan, worker.end_ps = None, None
            worker.version += 1
            if decision.until_ps is not None:
                self._schedule(worker, max(at_ps, decision.until_ps))
        else:
            self._start(worker, decision, at_ps)

    def _start(self, worker: SimulatedWorker, plan: Plan, at_ps: int) -> None:
        gpu = worker.gpu
        for sequence in plan.joins:
            joining = self._requests[sequence.handle].device(sequence.produced_tokens)
            gpu.join(joining)
            if joining.ending.extra_step:
                worker.silent.add(sequence.handle)
        prefills = [
            PrefillWork(chunk.sequence.handle, chunk.new_tokens, chunk.past_tokens, chunk.samples)
            for chunk in plan.prefills
        ]
        gpu.begin(prefills, decode=plan.decode, hold=plan.hold)
        steps = 1
        if not self._one_step and plan.max_steps > 1 and gpu.can_jump:
            steps = min(plan.max_steps, gpu.steps_to_finish or plan.max_steps)
            if plan.until_ps is not None and steps > 1:
                steps = gpu.steps_to_cover(plan.until_ps - at_ps - plan.wait_ps, steps)
        worker.plan, worker.start_ps, worker.steps = plan, at_ps + plan.wait_ps, steps
        self._schedule(worker, worker.start_ps + gpu.total_ps(steps))

    def _commit(self, worker: SimulatedWorker, plan: Plan, at_ps: int, ended: list[SimulatedRequest]) -> None:
        duration_ps, finished = worker.gpu.skip(worker.steps)
        worker.totals.num_steps += worker.steps
        worker.totals.busy_ps += duration_ps
        worker.totals.end_ps = at_ps
        worker.plan = None
        silent = frozenset(handle for handle, _ in finished if handle in worker.silent)
        worker.silent -= silent
        ran = Ran(worker.steps, at_ps, [(handle, END_REASON[reason]) for handle, reason in finished], silent)
        self._handle(worker, worker.replica.commit(plan, ran), ended)

    def _handle(self, worker: SimulatedWorker, events: Iterable[Event], ended: list[SimulatedRequest]) -> None:
        for event in events:
            match event:
                case Admitted(sequence):
                    request = self._requests[sequence.handle]
                    if request.admitted_ps is None:
                        request.admitted_ps, request.cached_tokens = sequence.admitted_ps, sequence.cached_tokens
                case FirstToken(sequence, at_ps):
                    self._requests[sequence.handle].first_token_ps = at_ps
                case Preempted(sequence):
                    self._requests[sequence.handle].num_preemptions += 1
                case Finished(sequence, reason, output_tokens, at_ps):
                    request = self._end(sequence, worker, "finished", ended)
                    request.reason, request.output_tokens, request.finished_ps = reason, output_tokens, at_ps
                case Cancelled(sequence):
                    self._end(sequence, worker, "cancelled", ended)
                case Dropped(sequence):
                    self._end(sequence, worker, "dropped", ended)
                case _:
                    pass

    def _end(
        self, sequence: Sequence, worker: SimulatedWorker, outcome: str, ended: list[SimulatedRequest]
    ) -> SimulatedRequest:
        request = self._requests.pop(sequence.handle)
        del self._worker_of[sequence.handle]
        request.outcome, request.worker = outcome, worker.name
        ended.append(request)
        return request
