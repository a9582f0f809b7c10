"""One scheduler under the virtual clock: carries out its core's decisions, as `scheduler.cluster` does live."""

from collections.abc import Callable
from collections.abc import Sequence as Many

from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.acceptance import ClusterRules
from lorrery.scheduler.core.adapters.loads import AdapterLog
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import Arrived, ClusterEvent, Joined, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import (
    ADAPTER_FACTS,
    Admitted,
    Cancelled,
    Dropped,
    Event,
    Facts,
    Failed,
    Finished,
    FirstToken,
    Raised,
    Recalled,
    Subscriber,
)
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.subscribers.history import AdapterTally, History
from lorrery.service.faults.rules import NO_FAULTS
from lorrery.simulator.interpreter import WeakTarget, weak_call
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.state import Clock, OpenRequests
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.vocabulary.adapters import AdapterFigures

Nudge = Callable[[SimulatedWorker, bool], None]
"""Notify a worker of new input; the flag says whether that may change its running plan."""


class SimulatedScheduler:
    """Carries out the decisions of one scheduler's core.

    Args:
        placement: chooses the worker of a request.
        rules: admission rules, and how long a request waits while there is no worker.
        clock: of the simulation.
        requests: of the simulation.
        nudge: see `Nudge`.
        finish: ends a request that has injected faults.

    Attributes:
        core: makes the decisions.
        facts: what happens, for subscribers.
        history: events so far; None: not recorded.
        tally: figures of adapters so far; None: not counted.
        raised: errors raised by policies: occurrences by message.
    """

    def __init__(
        self,
        placement: Placement,
        rules: ClusterRules,
        clock: Clock,
        requests: OpenRequests,
        nudge: Nudge,
        finish: Callable[[SimulatedRequest], None],
    ) -> None:
        self._weak_show = WeakTarget(self._show)
        self.core = ClusterCore(placement, rules, bring_up_to_date=weak_call(self._weak_show), catch_up=self._catch_up)
        self._reports_ends = self.core.keeps_backlog
        self._workers: dict[Member, SimulatedWorker] = {}
        self._clock = clock
        self._requests = requests
        self._nudge = nudge
        self._finish = finish
        self.facts = Facts()
        self.history: History | None = None
        self.tally: AdapterTally | None = None
        self.raised: dict[str, int] = {}
        self._looks_for_moves = False
        self._waits_until_ps: int | None = None  # time already scheduled for `_wait_is_over`

    # --- subscribers ------------------------------------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell a subscriber what happens from now on; of adapters too, if it is the first to want that."""
        self.facts.subscribe(subscriber)
        if self.facts.wants(*ADAPTER_FACTS):
            for member in self.core.members.values():
                if member.replica.adapters.log is None:
                    member.replica.adapters.log = AdapterLog()

    def keep_history(self) -> History:
        """Start recording a history and return it."""
        self.history = History()
        self.subscribe(self.history)
        return self.history

    def count_adapters(self) -> None:
        """Start counting loads, evictions and stays of adapters; to be called before any adapter is loaded."""
        self.tally = AdapterTally()
        self.subscribe(self.tally)

    def publish_adapter_changes(self, worker: SimulatedWorker) -> None:
        """Publish the changes of a worker's adapters since the last call."""
        log = worker.replica.adapters.log
        if log is not None and not log.is_empty:
            self.facts.publish(log.take(), self._clock.now_ps, worker.member)

    def adapter_figures(self, at_ps: int) -> dict[str, AdapterFigures]:
        """Return the figures of all adapters so far; empty: they are not counted."""
        if self.tally is None:
            return {}
        for worker in self._workers.values():
            self.publish_adapter_changes(worker)
        return self.tally.read([member.replica.adapters.log for member in self._workers], at_ps)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: SimulatedRequest) -> None:
        """Submit a request; it may be refused at once."""
        self._requests.by_handle[request.handle] = request
        timeout_ps = self._requests.timeout_ps
        if timeout_ps is not None:
            request.sequence.deadline_ps = request.sent_ps + timeout_ps
        if self.facts.wants(Arrived):
            self.facts.publish((Arrived(request.sequence),), self._clock.now_ps)
        events = self.core.submit(request.sequence, self._clock.now_ps)
        self._carry_out(events)
        if not events or self._reports_ends:
            self._wait_for_worker()

    def cancel(self, request: SimulatedRequest) -> None:
        """Cancel a request."""
        self._carry_out(self.core.cancel(request.sequence, self._clock.now_ps))

    def withdraw(self, request: SimulatedRequest) -> None:
        """End a request whose client no longer waits for it."""
        if request.faults is NO_FAULTS:
            self._requests.withdraw(request.handle)
        else:
            self._finish(request)

    def _carry_out(self, events: Many[ClusterEvent]) -> None:
        """Apply the core's decisions: notify workers, and end requests that were refused or withdrawn."""
        self.facts.publish(events, self._clock.now_ps)
        for event in events:
            if isinstance(event, Placed):
                self._nudge(self._workers[event.member], event.matters)
            elif isinstance(event, Refused):
                if not event.on_arrival:
                    self._ended(event.sequence, 0)
                self._requests.refuse(event.sequence.handle, event.refusal)
            elif isinstance(event, Withdrawn):
                if event.refusal is not None:
                    self._requests.by_handle[event.sequence.handle].refusal = event.refusal
                worker = self._workers[event.member]
                self._end_for_client(event.sequence, worker)
                self._nudge(worker, True)
            else:
                self._ended(event.sequence, 0)
                self._end_for_client(event.sequence, None)
                self.withdraw(self._requests.by_handle[event.sequence.handle])

    def _ended(self, sequence: Sequence, output_tokens: int) -> None:
        if self._reports_ends:
            self.core.ended(sequence, output_tokens, self._clock.now_ps)

    def _end_for_client(self, sequence: Sequence, worker: SimulatedWorker | None) -> None:
        """End a request for its client; the core releases it at the next boundary."""
        request, now_ps = self._requests.by_handle[sequence.handle], self._clock.now_ps
        if request.finished_ps is None:
            request.finished_ps = now_ps
            request.output_tokens = request.produced_tokens
            if worker is not None:
                request.output_tokens = worker.tokens_given(request, now_ps)
                worker.client_left(sequence.handle)

    def _show(self, members: Many[Member], at_ps: int) -> None:
        for member in members:
            self._workers[member].show(at_ps)

    def _catch_up(self, member: Member, at_ps: int) -> None:
        self._workers[member].catch_up(at_ps)

    # --- waits and moves --------------------------------------------------------------------------------------------

    def _wait_for_worker(self) -> None:
        """Schedule the next expiry of requests that wait without a worker."""
        until_ps = self.core.until_ps
        if until_ps is not None and until_ps != self._waits_until_ps:
            self._waits_until_ps = until_ps
            self._clock.at(until_ps, self._wait_is_over)

    def _wait_is_over(self) -> None:
        core, now_ps = self.core, self._clock.now_ps
        while (until_ps := core.until_ps) is not None and until_ps <= now_ps:
            self._carry_out(core.expire(now_ps))
        self._wait_for_worker()

    def _place(self, events: Many[ClusterEvent]) -> None:
        """Carry out decisions about workers, then place requests again until none is left to place."""
        self._carry_out(events)
        while self.core.is_placing:
            self._carry_out(self.core.place_again(self._clock.now_ps))
        self._wait_for_worker()
        self.look_for_moves()

    def look_for_moves(self) -> None:
        """Schedule a balancing of waiting requests after everything else that happens at this time."""
        if len(self._workers) > 1 and not self._looks_for_moves and self.core.may_move:
            self._looks_for_moves = True
            self._clock.at(self._clock.now_ps + 1, self._balance)

    def _balance(self) -> None:
        self._looks_for_moves = False
        for donor in dict.fromkeys(move.donor for move in self.core.balance(self._clock.now_ps)):
            self._nudge(self._workers[donor], True)

    # --- workers ----------------------------------------------------------------------------------------------------

    def introduce(self, worker: SimulatedWorker) -> list[ClusterEvent]:
        """Attach a worker; return the decisions about requests that waited for one."""
        worker.attached, self._workers[worker.member] = True, worker
        worker.facts = self.facts
        if self.facts.wants(*ADAPTER_FACTS):
            worker.replica.adapters.log = AdapterLog()
        self.facts.publish((Joined(worker.member),), self._clock.now_ps, worker.member)
        return self.core.attach(worker.member, self._clock.now_ps)

    def attach(self, worker: SimulatedWorker) -> None:
        """Attach a worker and place the requests that waited for one."""
        self._place(self.introduce(worker))

    def drain(self, worker: SimulatedWorker) -> None:
        """Give a worker no new requests, and place its waiting requests elsewhere."""
        gave_back, events = self.core.drain(worker.member, self._clock.now_ps)
        self.facts.publish((gave_back,), self._clock.now_ps, worker.member)
        self.handle(worker, gave_back.events)
        self._place(events)

    def lose(self, worker: SimulatedWorker) -> None:
        """Queue the requests of a lost worker again elsewhere."""
        member = worker.member
        gave_back, events = self.core.lose(member, self._clock.now_ps, worker.boundary_ps)
        self.publish_adapter_changes(worker)
        del self._workers[member]
        self.facts.publish((gave_back,), self._clock.now_ps, member)
        worker.gpu.clear()
        self.handle(worker, gave_back.events)
        self._place(events)

    def handle(self, worker: SimulatedWorker, events: Many[Event]) -> None:
        """Carry out the events of a worker's replica."""
        requests = self._requests
        self.facts.publish(events, self._clock.now_ps, worker.member)
        for event in events:  # first tokens and admissions are read from the sequence
            if isinstance(event, Finished):
                if self._reports_ends:
                    self._ended(event.sequence, event.output_tokens)
                request = requests.by_handle[event.sequence.handle]
                if request.finished_ps is not None:
                    request.worker = worker.name  # its client had left before the step ended
                    self.withdraw(request)
                    continue
                del requests.by_handle[request.handle]
                request.worker, request.outcome, request.reason = worker.name, "finished", event.reason
                request.output_tokens, request.finished_ps = event.output_tokens, event.at_ps
                if request.faults is NO_FAULTS:
                    requests.ended.append(request)
                else:
                    self._finish(request)
            elif isinstance(event, (Admitted, FirstToken)):
                continue
            elif isinstance(event, Recalled):
                self._carry_out(self.core.take_recalled(event, worker.member, self._clock.now_ps))
            elif isinstance(event, (Cancelled, Dropped, Failed)):
                self._end_without_finish(event, worker)
            elif isinstance(event, Raised):
                self.raised[event.message] = self.raised.get(event.message, 0) + 1

    def _end_without_finish(self, event: Cancelled | Dropped | Failed, worker: SimulatedWorker) -> None:
        handle = event.sequence.handle
        self._ended(event.sequence, 0)
        request = self._requests.by_handle[handle]
        request.worker = worker.name
        if isinstance(event, Dropped):
            self._requests.refuse(handle, refusals.dropped(event.sequence, event.reason))
            return
        if isinstance(event, Failed):
            self._requests.refuse(handle, refusals.raised(event.message))
        else:
            self.withdraw(request)
