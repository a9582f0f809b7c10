"""The cluster under a virtual clock: the same core and the same mock GPU, without a wall clock, a socket or a thread.

Who is let in, where a request goes and when a wait is over is decided in `scheduler.core.cluster`, as it is live; here
time is carried, and `simulator.scheduler` carries out what is decided. Between arrivals workers do not meet, so the
order of their next boundaries drives them all; each jumps from plan to plan (`simulator.worker`). By the law of the
core, commit(k) equals commit(j), plan, commit(k - j), that is equal to running every step.

Order at one time: arrivals first, then cancels, deadlines and faults in the order given, then the workers' boundaries
in order of attaching. So an arrival at a boundary is seen there, as it is live. What a boundary itself brings about (a
client's next request) comes behind it and what came before it.

Schedulers (shards) share nothing but the clock: a request belongs to the one that `choose_shard` names, as a router
does it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop
from typing import Final

from lorrery.chassis.fault_rules import NO_FAULTS
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.door import LETS_ALL_IN, ClusterRules
from lorrery.scheduler.core.history import History
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.core.protocols.placement import Placement
from lorrery.simulator.boundaries import Boundaries
from lorrery.simulator.clock import Clock
from lorrery.simulator.faulty_requests import FaultyRequests
from lorrery.simulator.membership import Membership
from lorrery.simulator.observers import as_one
from lorrery.simulator.open_requests import OpenRequests
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.request_faults import RequestFaultInjector
from lorrery.simulator.scheduler import SimulatedScheduler
from lorrery.simulator.signals_in import let_signals_in
from lorrery.simulator.step_span import Observer
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.output import Ending
from lorrery.worker.device.steptime import StepTimeModel

Follow = Callable[[SimulatedRequest, int], tuple[int, SimulatedRequest] | None]
"""Says what its client sends next, and when, given a request that has ended and the time; None: no further one."""

PAUSE = SimulatedRequest(-1, 0, 0, 0, Ending(0, FinishReason.LENGTH))
"""What `Simulation.run` yields after a tick that asked for a pause; no request."""

TURNS: Final = 1024
"""Turns of the loop, some ten milliseconds, between two looks whether it has been stopped or goes on for nobody."""


class Simulation:
    """Runs requests through workers.

    Args:
        workers: in order of attaching.
        placement: who gets a request; with several shards one each, in order.
        rules: of each scheduler: what it lets in, and how long a request waits while it has no worker.
        one_step: plan before every step, as the oracle does; slow.
        choose_shard: index of the scheduler that gets a request; needed with several.
        timeout_ps: requests not over so long after their arrival are cancelled.
        worker_timeout_ps: a worker whose step ends so much later than it said is lost.
        observers: told of what runs, see `observe`.

    Attributes:
        membership: lets workers come and go.
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
        worker_timeout_ps: int = NEVER,
        observers: Sequence[Observer] = (),
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
        self._tick_ps = NEVER  # the first of them
        self._pauses = False
        self._is_stopped = False
        self._arrival: tuple[int, SimulatedRequest] | None = None  # the next one
        self._new_pace: dict[int, StepTimeModel] = {}  # by the worker's order, until its next boundary
        self._schedulers = [
            SimulatedScheduler(one, rules, clock, self._requests, self._nudge, self._finish_faulty)
            for one in (placement if isinstance(placement, Sequence) else [placement])
        ]
        self.membership = Membership(clock, self._boundaries, self._schedulers, self._nudge, worker_timeout_ps)
        self._leaving = self.membership.leaving
        for worker in self.workers:
            self._schedulers[worker.shard].introduce(worker)
        self.observe(observers)

    @property
    def now_ps(self) -> int:
        """The clock."""
        return self._clock.now_ps

    @property
    def num_open(self) -> int:
        """Requests that have arrived and are not over."""
        return len(self._requests.by_handle)

    @property
    def num_moved(self) -> int:
        """Requests that have moved to another worker while they waited."""
        return sum([scheduler.core.num_moved for scheduler in self._schedulers])

    def num_waiting(self, shard: int) -> int:
        """Return how many requests of a scheduler wait, for a batch or for a worker."""
        return self._schedulers[shard].core.num_waiting

    def observe(self, observers: Sequence[Observer]) -> None:
        """Tell these, and nobody else, of what runs from now on."""
        observer = self._observer = as_one(observers)
        self._runs_chunks = not any(getattr(one, "reads_prompts", True) for one in observers)
        if observer is not None:
            observer.begin(self.now_ps)
        for worker in self.workers:
            worker.observer, worker.runs_chunks = observer, self._runs_chunks

    # --- frames -----------------------------------------------------------------------------------------------------

    @property
    def raised(self) -> dict[str, int]:
        """What policies raised: how often each message came."""
        found: dict[str, int] = {}
        for scheduler in self._schedulers:
            for message, times in scheduler.raised.items():
                found[message] = found.get(message, 0) + times
        return found

    @property
    def cores(self) -> list[ClusterCore]:
        """What decides, of each scheduler."""
        return [scheduler.core for scheduler in self._schedulers]

    @property
    def keeps_histories(self) -> bool:
        """Whether somebody wants to know what happens."""
        return self._schedulers[0].history is not None

    def keep_histories(self) -> list[History]:
        """Note from now on what happens, and return where, for each scheduler."""
        return [scheduler.keep_history() for scheduler in self._schedulers]

    def tick(self, first_ps: int, tick: Callable[[int], int]) -> None:
        """Let something look at the state at times of its own, before anything else happens then.

        Args:
            first_ps: the first time.
            tick: gets the time, and returns the next one, `NEVER` if there is none. Steps that have ended before are
                committed.
        """
        self._ticks.append((first_ps, tick))
        self._tick_ps = min(self._tick_ps, first_ps)

    def pause(self) -> None:
        """Let `run` yield `PAUSE` once the ticks of now have happened; for a tick to call."""
        self._pauses = True

    def stop(self) -> None:
        """End `run` soon, whatever is still open; for a signal handler."""
        self._is_stopped = True

    def note_fault(self, text: str) -> None:
        """Note that a fault happens, where that is wanted."""
        for scheduler in self._schedulers:
            if scheduler.history is not None:
                scheduler.history.fault(text, self.now_ps)

    def plan_of(self, name: str) -> Plan | None:
        """Return the plan that a worker runs; None: it is idle."""
        return self._by_name[name].plan

    def inject(self, injector: RequestFaultInjector) -> None:
        """Let requests that arrive from now on meet its faults."""
        self._faulty = FaultyRequests(injector, self._clock, self._requests, self._submit)

    def close(self) -> list[SimulatedRequest]:
        """End every request whose client waits, as interrupted; the simulation is of no more use."""
        still_open = list(self._requests.by_handle.values())
        for request in still_open:
            if request.finished_ps is not None:  # its client has gone
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
        """Let something happen at a time: a cancel, a fault."""
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
            follow: what clients send after a request that has ended.
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
        """Let happen what comes next until a request ends or a tick asks for a pause; False: nothing is left to do.

        Nor is anything once idle workers alone are asked again and again, by policies that name one time after another,
        and no request is there. Of policies that come to rest by themselves no turn is left out.

        No part of the generator: compiled, that would look each of its variables up.
        """
        num_turns, in_vain = 0, False
        clock, boundaries = self._clock, self._boundaries
        coming, deadlines, ended = clock.coming, self._requests.deadlines, self._requests.ended
        arrival = self._arrival
        arrival_ps = NEVER if arrival is None else arrival[0]
        if self._is_stopped:
            return False
        while True:
            num_turns += 1
            if num_turns == TURNS:
                let_signals_in()
                nobody_comes = arrival is None and not coming and not self._requests.by_handle
                if self._is_stopped or (in_vain and nobody_comes):
                    return False
                num_turns, in_vain = 0, nobody_comes
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
        """Let ticks happen that are due before anything else, unless nobody is there who would be seen."""
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
        """Withdraw a request now; ignored if it is over."""
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
        """Take in a worker that may attach from now on; its boundaries come after those of the others."""
        worker.order, worker.clock = len(self.workers), self._clock
        worker.observer, worker.runs_chunks = self._observer, self._runs_chunks
        self.workers.append(worker)
        self._boundaries.enter(self.workers)
        self._by_name[worker.name] = worker

    def change_pace(self, worker: SimulatedWorker, step_time: StepTimeModel) -> None:
        """Let a worker's steps take what another model says, from its next boundary on."""
        self._new_pace[worker.order] = step_time
        self._nudge(worker, True)

    def freeze(self, worker: SimulatedWorker, until_ps: int) -> None:
        """Let a worker begin no step from now until a time, or for ever (`NEVER`)."""
        worker.frozen_until_ps = until_ps
        self._nudge(worker, True)

    def _nudge(self, worker: SimulatedWorker, heeded: bool) -> None:
        if worker.plan is None:
            self._schedule(worker, max(self.now_ps, worker.boundary_ps))
        elif heeded and (boundary_ps := worker.interrupt(self.now_ps)) is not None:
            self._schedule(worker, boundary_ps)

    def _schedule(self, worker: SimulatedWorker, at_ps: int) -> None:
        if worker.end_ps != at_ps:
            self._boundaries.move(worker, at_ps)

    def _at_boundary(self, worker: SimulatedWorker, at_ps: int) -> None:
        scheduler, plan = self._schedulers[worker.shard], worker.plan
        if plan is not None:
            events = worker.finish(plan, at_ps, self._requests.by_handle)
            if events:
                scheduler.handle(worker, events)
        if self._new_pace and (step_time := self._new_pace.pop(worker.order, None)) is not None:
            worker.use(step_time)
        worker.boundary_ps = at_ps
        decision = worker.member.plan(at_ps)
        worker.totals.num_plans += 1
        if worker.member.changed:
            worker.member.changed = False
            scheduler.look_for_moves()
        if decision.events:
            scheduler.handle(worker, decision.events)
        if scheduler.history is not None:
            scheduler.note_decision(worker, decision.events, at_ps)
        if decision.leaves:
            for sequence in decision.leaves:
                worker.gpu.leave(sequence.handle)
        if not isinstance(decision, Idle):
            self._schedule(worker, worker.start(decision, at_ps, self._requests.by_handle, one_step=self._one_step))
            if worker.frozen_until_ps > at_ps:
                self.membership.watch(worker, decision)
        elif self._leaving and worker.order in self._leaving and not worker.member.sequences:
            self.membership.leave(worker)
        elif decision.until_ps is not None:
            self._schedule(worker, max(at_ps, decision.until_ps))
        else:
            self._schedule(worker, NEVER)
