"""One worker of a replay: takes inputs, plans and runs steps, and compares each plan and step at once."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from lorrery.scheduler.core.adapters.loads import AdapterLog
from lorrery.scheduler.core.facts import Event, Preempted, Recalled
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.subscribers.record import Decisions, Record, describe_events, tokens_checksum
from lorrery.service.faults.kinds import Fault
from lorrery.service.faults.rules import RuleBook
from lorrery.simulator.replay.journal import ExpectedPlan, ExpectedStep, Late, Line, WorkerLines
from lorrery.simulator.replay.parts import DifferenceError, Replayed, ReplayedRequest, ReplayParts, compare
from lorrery.vocabulary import u32
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.batch import StepOutcome
from lorrery.worker.device.gpu import MockGpu


@dataclass(slots=True)
class _LateInput:
    content: Record
    request: ReplayedRequest | None
    late: Late


class ReplayWorker:
    """One worker of a replay.

    Attributes:
        member: its batch and queue.
        is_ready: whether it has neither drained nor been lost.
        due_ps: time of its next plan while no plan runs; None: at the next input.
        position_ps: the boundary before the next step.
        boundary_ps: the end of the last step.
    """

    def __init__(
        self,
        lines: WorkerLines,
        member: Member,
        gpu: MockGpu,
        faults: RuleBook,
        requests: dict[int, ReplayedRequest],
        parts: ReplayParts,
        result: Replayed,
    ) -> None:
        self.member = member
        self.is_ready = True
        self._lines, self._gpu, self._faults = lines, gpu, faults
        self._spells = parts.spells(faults, member.name)
        self._requests, self._parts, self._result = requests, parts, result
        self._adapter_log = member.replica.adapters.log = AdapterLog()
        self._stops = deque(lines.stops)
        self._num_seen = 0
        self._num_steps = 0
        self._decisions = Decisions()
        self._late: deque[_LateInput] = deque()  # in order of their boundaries
        self._never: deque[_LateInput] = deque()
        self._plan: Plan | None = None
        self._steps_left = 0
        self._until_ps: int | None = None
        self._due_ps: int | None = None
        self._was_idle = True  # at the last decision, or before the first one
        self._nudges_ps: deque[int] = deque()  # times of inputs since, not followed by a decision
        self._planned_ps = -1
        self._position_ps = 0
        self._boundary_ps = 0

    # --- what is given ----------------------------------------------------------------------------------------------

    def give(self, content: Record, request: ReplayedRequest | None) -> None:
        """Apply an input at its time: an arrival, or something else if `request` is None."""
        late = self._lines.late.get(content["input"])
        if late is None and content.get("overdue"):
            late = Late(NEVER, None, 0)  # the journal ends before it takes effect
        if late is not None:
            self._result.num_late += 1
            where = self._never if late.boundary_ps is None else self._late
            where.append(_LateInput(content, request, late))
            return
        self._run(content["at_ps"], self._num_wanted)
        self._deliver(content, request, content["at_ps"])

    def take_faults(self, faults: Iterable[Fault], from_ps: int, *, add: bool) -> None:
        """Apply an operator's faults from a time on, replacing the previous ones or adding to them."""
        self._faults.take(faults, from_ps, add=add)
        self._spells = self._parts.spells(self._faults, self.member.name)

    def _deliver(self, content: Record, request: ReplayedRequest | None, nudge_ps: int | None) -> None:
        """Put an input into the inbox; it may cause a new plan from `nudge_ps` on (None: never)."""
        member, at_ps, heeded = self.member, content["at_ps"], True
        if content["type"] == "recall":
            member.recall(content["handle"], content["to"], at_ps)
        elif content["type"] == "retire":
            member.replica.retire(content["adapter_key"], at_ps)
        elif content["type"] == "load":
            member.replica.load(self._parts.make_adapter(*content["adapter"]), at_ps)
        elif request is None:
            member.replica.cancel(content["handle"], at_ps)
        else:
            heeded = member.submit(request.sequence, at_ps)
        if nudge_ps is not None and (heeded or self._plan is None):
            self._heed(nudge_ps)

    def _heed(self, at_ps: int) -> None:
        """Plan at the first boundary at or after this time."""
        if self._plan is None:
            at_ps = max(at_ps, self._boundary_ps)
            if self._was_idle:
                self._nudges_ps.append(at_ps)
            self._due_ps = at_ps if self._due_ps is None else min(self._due_ps, at_ps)
        else:
            self._until_ps = at_ps if self._until_ps is None else min(self._until_ps, at_ps)

    def give_back(self, line: Line) -> None:
        """Drain or lose the worker, after the plans and steps that precede this line in the journal."""
        content = line.content
        self.run_to_stop()
        self._decide_without_trace(content["at_ps"])
        lost = line.type == "lost"
        # Inputs that took effect earlier without a trace, and those that never did.
        for inputs in (self._late, self._never):
            for late in [one for one in inputs if lost or one.late.line < line.number]:
                inputs.remove(late)  # one that waits for another stop may stand before it
                self._deliver(late.content, late.request, None)
        if lost:
            sequences, events = self.member.lose(max(content["at_ps"], self._boundary_ps))
            self._count_adapters()
        else:
            sequences, events = self.member.withdraw_waiting(content["at_ps"])
        self.is_ready = False
        record = {
            "num_steps": self._num_steps,
            "boundary_ps": self._boundary_ps,
            "requeued": [[sequence.handle, sequence.produced_tokens] for sequence in sequences],
            **describe_events(events, phases=self._parts.has_phases),
        }
        given = ("type", "worker", "at_ps")
        compare(line.number, line.type, record, {k: v for k, v in content.items() if k not in given})
        self._stops.popleft()

    # --- running ----------------------------------------------------------------------------------------------------

    @property
    def _num_wanted(self) -> int:
        """Plans and steps before the next stop, or before the journal's end."""
        return self._stops[0] if self._stops else len(self._lines.expected)

    def run_to_stop(self) -> None:
        """Run all plans and steps that the journal has before this worker's next stop, or before its own end."""
        self._run_to(self._num_wanted)

    def _decide_without_trace(self, before_ps: int) -> None:
        """Make the decisions that left no trace: after the end of a plan, or on inputs to an idle worker.

        They led to no other plan, but count as waiting for an adapter. The end of an adapter load is not an input: no
        decision need have followed it.
        """
        if self._plan is None and not self._was_idle and self._due_ps is not None and self._due_ps < before_ps:
            self._decide(self._due_ps)
        while self._plan is None and self._nudges_ps and self._nudges_ps[0] < before_ps:
            self._decide(self._nudges_ps[0])

    def run_to_line(self, line: int) -> None:
        """Run all plans and steps that the journal has before this line."""
        self._run_to(bisect_left(self._lines.expected, line, key=lambda expected: expected.line))

    def _run_to(self, num_wanted: int) -> None:
        if self._num_seen >= num_wanted:
            return
        last = self._lines.expected[num_wanted - 1]
        self._run(last.at_ps + 1, num_wanted)
        if self._num_seen < num_wanted:
            missing = self._lines.expected[self._num_seen]
            raise DifferenceError(missing.line, f"the simulation has no {_name(missing)} at {missing.at_ps} ps")

    def _run(self, before_ps: int, num_wanted: int) -> None:
        """Run through all boundaries before this time, but through no more plans and steps than wanted."""
        while self._num_seen < num_wanted:
            while self._late and self._take_late():
                pass
            next_ps = self._next_ps()
            if next_ps is None or next_ps >= before_ps:
                return
            if self._plan is None:
                self._decide(next_ps)
            else:
                self._step(self._plan, next_ps)

    def _take_late(self) -> bool:
        """Deliver the first late input, and others with the same boundary, if their boundary comes next."""
        first, next_ps = self._late[0].late, self._next_ps()
        boundary_ps = first.boundary_ps
        assert boundary_ps is not None
        reached = next_ps is None or next_ps >= boundary_ps
        if first.missed:
            if self._planned_ps < boundary_ps:
                if reached:  # plans made there without them come first
                    self._heed(boundary_ps)
                return False
            if self._plan is None and self._due_ps == boundary_ps:
                return False  # further plans made there without them come first
            self._plan = None  # the step under way is dropped
        elif not reached:
            return False
        while self._late and (late := self._late[0].late).boundary_ps == boundary_ps and late.missed == first.missed:
            given = self._late.popleft()
            self._deliver(given.content, given.request, boundary_ps)
        return True

    def _count_adapters(self) -> None:
        for event in self._adapter_log.take():
            self._result.tally.count(event)

    def _decide(self, at_ps: int) -> None:
        decision = self.member.plan(at_ps)
        self._count_adapters()
        self._planned_ps = at_ps
        while self._nudges_ps and self._nudges_ps[0] <= at_ps:
            self._nudges_ps.popleft()
        record = self._decisions.record(decision)
        if record is not None:
            self._see_plan(at_ps, record)
        for event in decision.events:
            if isinstance(event, Recalled):
                self.member.let_go(event)
            elif isinstance(event, Preempted):  # with `core.overlap` its last token is lost
                sequence = event.sequence
                del self._requests[sequence.handle].token_ids[sequence.produced_tokens :]
        for sequence in decision.leaves:
            self._gpu.leave(sequence.handle)
        if isinstance(decision, Idle):
            self._was_idle, self._due_ps = True, decision.until_ps
            return
        for sequence in decision.joins:
            self._gpu.join(self._requests[sequence.handle].device(self._parts.answers))
        self._gpu.begin(decision.prefills, decode=decision.decode, hold=decision.hold)
        self._plan, self._due_ps, self._position_ps = decision, None, at_ps
        self._was_idle = False
        self._nudges_ps.clear()
        self._steps_left, self._until_ps = decision.max_steps, decision.until_ps

    def _next_ps(self) -> int | None:
        """Return when the next plan is due or the next step ends; gaps before steps come from the journal."""
        if self._plan is None:
            return self._due_ps
        wait_ps = self._plan.wait_ps if self._steps_left == self._plan.max_steps else 0
        coming = self._lines.expected[self._num_seen]
        gap_ps = coming.gap_ps if isinstance(coming, ExpectedStep) else 0
        return self._position_ps + gap_ps + wait_ps + self._spells.stretch(self._gpu.step_ps(), self._position_ps)

    def _step(self, plan: Plan, end_ps: int) -> None:
        outcome = self._gpu.advance()
        for handle, token_id in zip(outcome.handles.tolist(), outcome.token_ids.tolist(), strict=True):
            self._requests[handle].token_ids.append(token_id)
        given = set(outcome.handles.tolist()) if outcome.finished else set()
        silent = frozenset(handle for handle, _ in outcome.finished if handle not in given)
        ended = list(outcome.finished)
        events = self.member.commit(plan, Ran(1, end_ps, ended, silent))
        self._count_adapters()
        self._see_step(end_ps, outcome, events)
        self._position_ps = self._boundary_ps = end_ps
        self._steps_left -= 1
        over = bool(outcome.finished) and (not plan.hold or not self._gpu.num_unended)
        if over or not self._steps_left or (self._until_ps is not None and end_ps >= self._until_ps):
            self._plan, self._due_ps = None, end_ps
        else:
            self.member.replica.make_room(plan)

    # --- comparing --------------------------------------------------------------------------------------------------

    def _see_plan(self, at_ps: int, record: Record) -> None:
        if self._num_seen >= self._num_wanted:
            last = self._lines.expected[self._num_seen - 1].line if self._num_seen else 0
            raise DifferenceError(last, f"the simulation plans at {at_ps} ps, and the journal has no such plan")
        expected = self._lines.expected[self._num_seen]
        if not isinstance(expected, ExpectedPlan):
            raise DifferenceError(expected.line, f"the simulation plans anew at {at_ps} ps, before this step")
        compare(expected.line, "plan", {"at_ps": at_ps, **record}, {"at_ps": expected.at_ps, **expected.record})
        self._num_seen += 1
        self._result.num_plans += 1

    def _see_step(self, end_ps: int, outcome: StepOutcome, events: list[Event]) -> None:
        expected = self._lines.expected[self._num_seen]
        if not isinstance(expected, ExpectedStep):
            raise DifferenceError(expected.line, f"the simulation runs a step to {end_ps} ps before this plan")
        checksum = tokens_checksum(u32.pack_array(outcome.handles), u32.pack_array(outcome.token_ids))
        compare(
            expected.line,
            "step",
            {
                "begin_ps": self._position_ps,
                "end_ps": end_ps,
                "tokens": checksum,
                **describe_events(events, phases=self._parts.has_phases),
            },
            {
                "begin_ps": expected.begin_ps,
                "end_ps": expected.end_ps,
                "tokens": expected.checksum,
                **expected.events,
            },
        )
        self._num_seen += 1
        self._num_steps += 1
        self._result.num_steps += 1
        self._result.num_tokens += len(outcome.handles)
        self._result.num_gaps += bool(expected.gap_ps)


def _name(expected: ExpectedPlan | ExpectedStep) -> str:
    return "plan" if isinstance(expected, ExpectedPlan) else "step"
