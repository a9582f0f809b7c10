"""The cluster under a virtual clock: the same core and the same mock GPU, without a wall clock, a socket or a thread.

`scheduler.core.cluster` decides admission, placement and the end of waits, as in the live cluster; this module advances
time, and `scheduler.py` carries out the decisions. Workers do not interact between arrivals, so the loop always takes
the earliest next boundary of any worker; each worker jumps from plan to plan (`worker.py`). By the law of the core,
commit(k) equals commit(j), plan, commit(k - j), so a jump equals running every step.

Order at one time: arrivals first, then cancels, deadlines and faults in the order given, then the workers' boundaries
in order of attaching. So a plan at a boundary includes an arrival at that time, as in the live cluster. An event that
a boundary itself causes (a client's next request) comes after that boundary and everything before it.

Schedulers (shards) share only the clock: `choose_shard` assigns each request to one, as a router does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop
from typing import Final

from lorrery.scheduler.core.acceptance import NO_RULES, ClusterRules
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.facts import FaultBegan, Subscriber
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.subscribers.history import History
from lorrery.service.faults.rules import NO_FAULTS
from lorrery.simulator.interpreter import run_signal_handlers
from lorrery.simulator.loop.membership import Boundaries, Membership
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.scheduler import SimulatedScheduler
from lorrery.simulator.loop.state import Clock, OpenRequests
from lorrery.simulator.loop.worker import RunBegan, SimulatedWorker, StepSpan
from lorrery.simulator.request_faults import FaultyRequests, RequestFaultInjector
from lorrery.vocabulary.adapters import AdapterFigures
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.output import Ending
from lorrery.worker.device.steptime import StepTimeModel

Follow = Callable[[SimulatedRequest, int], tuple[int, SimulatedRequest] | None]
"""Return a client's next request and its time, given an ended request and the time; None: there is no next request."""

PAUSE = SimulatedRequest(-1, 0, 0, 0, Ending(0, FinishReason.LENGTH))
"""Yielded by `Simulation.run` after a tick requested a pause; not a real request."""

ITERATIONS_PER_CHECK: Final = 1024
"""Loop iterations, some ten milliseconds, between two checks for a stop or for a run with no requests left."""


class Simulation:
    """Runs requests through workers.

    Args:
        workers: in order of attaching.
        placement: chooses the worker of a request; with several shards, one per shard, in order.
        rules: admission rules of each scheduler, and how long a request waits while there is no worker.
        one_step: plan before every step, as the oracle does; slow.
        choose_shard: returns the index of a request's scheduler; required with several shards.
        timeout_ps: requests that have not ended this long after their arrival are cancelled.
        worker_timeout_ps: a worker is lost when its step ends this much later than predicted.
        subscribers: of the facts, see `subscribe`.

    Attributes:
        membership: attaches, drains and removes workers.
    """

    def __init__(
        self,
        workers: Iterable[SimulatedWorker],
        placement: Placement | Sequence[Placement],
        *,
        rules: ClusterRules = NO_RULES,
        one_step: bool = False,
        choose_shard: Callable[[SimulatedRequest], int] | None = None,
        timeout_ps: int | None = None,
        worker_timeout_ps: int = NEVER,
        subscribers: Sequence[Subscriber] = (),
    ) -> None:
        self.workers = list(workers)
        self._by_name = {worker.name: worker for worker in self.workers}
        self._clock = clock = Clock()
        for order, worker in enumerate(self.workers):
            worker.order, worker.clock = order, clock
        self._requests = OpenRequests(clock, timeout_ps)
        self._one_step = one_step
        self._choose_shard = choose_shard
        self._faulty: FaultyRequests | None = None
        self._boundaries = Boundaries(self.workers)
        self._ticks: list[tuple[int, Callable[[int], int]]] = []
        self._tick_ps = NEVER  # earliest time in `_ticks`
        self._pauses = False
        self._is_stopped = False
        self._arrival: tuple[int, SimulatedRequest] | None = None  # next arrival
        self._new_pace: dict[int, StepTimeModel] = {}  # keyed by the worker's order; applied at its next boundary
        self._schedulers = [
            SimulatedScheduler(one, rules, clock, self._requests, self._nudge, self._finish_faulty)
            for one in (placement if isinstance(placement, Sequence) else [placement])
        ]
        self.membership = Membership(clock, self._boundaries, self._schedulers, self._nudge, worker_timeout_ps)
        self._leaving = self.membership.leaving
        for worker in self.workers:
            self._schedulers[worker.shard].introduce(worker)
        self._runs_chunks = True
        self.subscribe(subscribers)

    @property
    def now_ps(self) -> int:
        """Current device time."""
        return self._clock.now_ps

    @property
    def num_open(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._requests.by_handle)

    @property
    def num_moved(self) -> int:
        """Waiting requests moved to another worker so far."""
        return sum([scheduler.core.num_moved for scheduler in self._schedulers])

    def num_waiting(self, shard: int) -> int:
        """Return how many requests of a scheduler wait for a batch or for a worker."""
        return self._schedulers[shard].core.num_waiting

    def subscribe(self, subscribers: Sequence[Subscriber]) -> None:
        """Tell these, too, what happens from now on; the part of the run that counts begins."""
        for scheduler in self._schedulers:
            for one in subscribers:
                scheduler.subscribe(one)
            scheduler.facts.publish((RunBegan(),), self.now_ps)
        self._runs_chunks = self._runs_chunks and not any(getattr(one, "reads_prompts", True) for one in subscribers)
        for worker in self.workers:
            self._take_in(worker)

    def _take_in(self, worker: SimulatedWorker) -> None:
        worker.facts = facts = self._schedulers[worker.shard].facts
        worker.publishes_steps, worker.runs_chunks = facts.wants(StepSpan), self._runs_chunks

    # --- frames -----------------------------------------------------------------------------------------------------

    @property
    def raised(self) -> dict[str, int]:
        """Errors raised by policies: occurrences by message."""
        found: dict[str, int] = {}
        for scheduler in self._schedulers:
            for message, times in scheduler.raised.items():
                found[message] = found.get(message, 0) + times
        return found

    @property
    def cores(self) -> list[ClusterCore]:
        """Deciding core of each scheduler."""
        return [scheduler.core for scheduler in self._schedulers]

    @property
    def keeps_histories(self) -> bool:
        """Whether histories are recorded."""
        return self._schedulers[0].history is not None

    def keep_histories(self) -> list[History]:
        """Start recording histories; return one per scheduler."""
        return [scheduler.keep_history() for scheduler in self._schedulers]

    def count_adapters(self) -> None:
        """Start counting loads, evictions and stays of adapters; to be called before any adapter is loaded."""
        for scheduler in self._schedulers:
            scheduler.count_adapters()

    def adapter_figures(self) -> list[dict[str, AdapterFigures]]:
        """Return each scheduler's figures of adapters until now."""
        return [scheduler.adapter_figures(self.now_ps) for scheduler in self._schedulers]

    def tick(self, first_ps: int, tick: Callable[[int], int]) -> None:
        """Call a function at times it chooses itself, before anything else at those times.

        Args:
            first_ps: time of the first call.
            tick: takes the time and returns the time of the next call, `NEVER` for none. Steps that ended before that
                time are committed first.
        """
        self._ticks.append((first_ps, tick))
        self._tick_ps = min(self._tick_ps, first_ps)

    def pause(self) -> None:
        """Make `run` yield `PAUSE` once all ticks due now have run; to be called from a tick."""
        self._pauses = True

    def stop(self) -> None:
        """End `run` soon, with requests still open; safe in a signal handler."""
        self._is_stopped = True

    def note_fault(self, text: str) -> None:
        """Tell subscribers of a fault."""
        for scheduler in self._schedulers:
            scheduler.facts.publish((FaultBegan(text),), self.now_ps)

    def plan_of(self, name: str) -> Plan | None:
        """Return the plan that a worker runs; None if it is idle."""
        return self._by_name[name].plan

    def inject(self, injector: RequestFaultInjector) -> None:
        """Apply the injector's faults to requests that arrive from now on."""
        self._faulty = FaultyRequests(injector, self._clock, self._requests, self._submit)

    def close(self) -> list[SimulatedRequest]:
        """End all open requests as interrupted and return them; the simulation cannot be used afterwards."""
        still_open = list(self._requests.by_handle.values())
        for request in still_open:
            if request.finished_ps is not None:  # its client has left
                self._schedulers[request.shard].withdraw(request)
                self._requests.ended.remove(request)
                continue
            worker = self._worker_of(request)
            request.outcome, request.finished_ps = "interrupted", self.now_ps
            request.output_tokens = (
                request.produced_tokens if worker is None else worker.tokens_given(request, self.now_ps)
            )
        self._requests.by_handle.clear()
        return still_open

    def _worker_of(self, request: SimulatedRequest) -> SimulatedWorker | None:
        for worker in self.workers:
            if worker.attached and request.handle in worker.member.sequences:
                return worker
        return None

    # --- the loop ---------------------------------------------------------------------------------------------------

    def at(self, at_ps: int, happen: Callable[[], None]) -> None:
        """Schedule a callback, such as a cancel or a fault, at a time."""
        self._clock.at(at_ps, happen)

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
            follow: returns what a client sends after one of its requests ends.
        """
        for at_ps, handle in cancels:
            self.at(at_ps, partial(self.cancel, handle))
        arriving, ended = iter(arrivals), self._requests.ended
        self._arrival = next(arriving, None)
        while self._run_on(arriving, follow is not None):
            if self._pauses:
                self._pauses = False
                yield PAUSE
                continue
            if follow is not None:
                self._send_next(follow)
            yield from ended
            ended.clear()

    def _run_on(self, arriving: Iterator[tuple[int, SimulatedRequest]], some_follow: bool) -> bool:
        """Process events in order until a request ends or a tick requests a pause; False: nothing is left to do.

        The run also ends when there are no requests and only boundaries of idle workers remain, whose policies name
        one time after another. For policies that come to rest by themselves, no turn is skipped.

        Kept outside the generator: a compiled generator would look up each of its variables.
        """
        num_iterations, in_vain = 0, False
        clock, boundaries = self._clock, self._boundaries
        coming, deadlines, ended = clock.coming, self._requests.deadlines, self._requests.ended
        arrival = self._arrival
        arrival_ps = NEVER if arrival is None else arrival[0]
        if self._is_stopped:
            return False
        while True:
            num_iterations += 1
            if num_iterations == ITERATIONS_PER_CHECK:
                run_signal_handlers()
                nobody_comes = arrival is None and not coming and not self._requests.by_handle
                if self._is_stopped or (in_vain and nobody_comes):
                    return False
                num_iterations, in_vain = 0, nobody_comes
            boundary_ps = boundaries.next_ps
            coming_ps = coming[0][0] if coming else NEVER
            while deadlines and deadlines[0].outcome is not None:
                deadlines.popleft()
            if deadlines and (due_ps := self._requests.due_ps()) < coming_ps:
                coming_ps = due_ps
            if self._ticks and self._ticked(
                min(arrival_ps, boundary_ps, coming_ps), arrival is None and not some_follow
            ):
                if self._pauses:
                    return True
                continue
            if arrival is not None and arrival_ps <= boundary_ps and arrival_ps <= coming_ps:
                clock.now_ps = arrival_ps
                self._arrive(arrival[1])
                self._arrival = arrival = next(arriving, None)
                arrival_ps = NEVER if arrival is None else arrival[0]
            elif coming_ps <= boundary_ps:
                if coming_ps == NEVER:
                    return False
                clock.now_ps = coming_ps
                if coming and coming[0][0] == coming_ps:
                    heappop(coming)[2]()
                else:
                    self._time_out(deadlines.popleft())
            else:
                worker = boundaries.first
                clock.take_turn(boundary_ps, worker.order)
                self._at_boundary(worker, boundary_ps)
            if ended:
                return True

    def _ticked(self, next_ps: int, nobody_comes: bool) -> bool:
        """Run the ticks that are due before any other event, unless no request is open and none will arrive."""
        if self._tick_ps > next_ps or next_ps == NEVER or (nobody_comes and not self._requests.by_handle):
            return False
        at_ps = self._clock.now_ps = self._tick_ps
        for worker in self.workers:
            if worker.attached:
                worker.catch_up(at_ps)
        ticks = [(tick(at_ps) if due_ps == at_ps else due_ps, tick) for due_ps, tick in self._ticks]
        self._ticks = [one for one in ticks if one[0] < NEVER]
        self._tick_ps = min([due_ps for due_ps, _ in self._ticks], default=NEVER)
        return True

    def _send_next(self, follow: Follow) -> None:
        for request in self._requests.ended:
            following = follow(request, self.now_ps)
            if following is not None:
                self.at(following[0], partial(self._arrive, following[1]))

    # --- clients ----------------------------------------------------------------------------------------------------

    def _arrive(self, request: SimulatedRequest) -> None:
        if self._faulty is None or not self._faulty.take(request):
            self._submit(request)

    def _submit(self, request: SimulatedRequest) -> None:
        if self._choose_shard is not None:
            request.shard = self._choose_shard(request)
        self._schedulers[request.shard].submit(request)
        if request.outcome is None and request.faults is NO_FAULTS:
            self._requests.expire_in_time(request)

    def cancel(self, handle: int) -> None:
        """Cancel a request now; ignored if it has ended."""
        request = self._requests.by_handle.get(handle)
        if request is not None and (self._faulty is None or not self._faulty.cancel(request)):
            self._schedulers[request.shard].cancel(request)

    def _time_out(self, request: SimulatedRequest) -> None:
        request.detail = "deadline exceeded"
        self.cancel(request.handle)

    def _finish_faulty(self, request: SimulatedRequest) -> None:
        assert self._faulty is not None
        self._faulty.finish(request)

    # --- workers ----------------------------------------------------------------------------------------------------

    def add(self, worker: SimulatedWorker) -> None:
        """Add a worker that may attach from now on; at equal times its boundaries come after those of the others."""
        worker.order, worker.clock = len(self.workers), self._clock
        self._take_in(worker)
        self.workers.append(worker)
        self._boundaries.enter(self.workers)
        self._by_name[worker.name] = worker

    def change_pace(self, worker: SimulatedWorker, step_time: StepTimeModel) -> None:
        """Use another step-time model for a worker from its next boundary on."""
        self._new_pace[worker.order] = step_time
        self._nudge(worker, True)

    def freeze(self, worker: SimulatedWorker, until_ps: int) -> None:
        """Keep a worker from beginning any step from now until a time, or for ever (`NEVER`)."""
        worker.frozen_until_ps = until_ps
        self._nudge(worker, True)

    def _nudge(self, worker: SimulatedWorker, matters: bool) -> None:
        if worker.plan is None:
            self._boundaries.move(worker, max(self.now_ps, worker.boundary_ps))
        elif matters and (boundary_ps := worker.interrupt(self.now_ps)) is not None:
            self._boundaries.move(worker, boundary_ps)

    def _at_boundary(self, worker: SimulatedWorker, at_ps: int) -> None:
        scheduler, plan = self._schedulers[worker.shard], worker.plan
        if plan is not None:
            events = worker.finish(plan, at_ps, self._requests.by_handle)
            if events:
                scheduler.handle(worker, events)
        if self._new_pace and (step_time := self._new_pace.pop(worker.order, None)) is not None:
            worker.gpu.use(step_time)
        worker.boundary_ps = at_ps
        decision = worker.member.plan(at_ps)
        worker.totals.num_plans += 1
        if worker.member.changed:
            worker.member.changed = False
            scheduler.look_for_moves()
        if decision.leaves:
            for sequence in decision.leaves:
                worker.gpu.leave(sequence.handle)
        if not isinstance(decision, Idle):
            self._boundaries.move(
                worker, worker.start(decision, at_ps, self._requests.by_handle, one_step=self._one_step)
            )
            if worker.frozen_until_ps > at_ps:
                self.membership.watch(worker, decision)
        else:
            self._boundaries.move(worker, NEVER if decision.until_ps is None else max(at_ps, decision.until_ps))
        if worker.replica.adapters.log is not None:
            scheduler.publish_adapter_changes(worker)
        # Only now: a sequence that has left may come back to this worker, and would change the decision just made.
        if decision.events:
            scheduler.handle(worker, decision.events)
        if self._leaving and worker.plan is None and worker.order in self._leaving and not worker.member.sequences:
            self.membership.leave(worker)
