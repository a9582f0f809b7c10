"""Runs a journal's inputs through the same core and mock GPU under a virtual clock, and compares what comes out.

The simulation is given what `simulator.journal` calls inputs, and follows the rule for when they take effect: at the
first boundary at or after their stamp. It arrives by itself at every plan and every step; each is compared at once, to
the picosecond, with what the journal says that the live cluster did. At the first difference it stops: what follows
would differ because of it.

Workers meet only where a request moves from one to another, so each is run up to the time of its next input.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.base import Placement
from lorrery.scheduler.core.plan import Event, Idle, Plan, Ran, Recalled
from lorrery.scheduler.core.record import Decisions, Record, describe_events, tokens_checksum
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.simulator.journal import ExpectedPlan, ExpectedStep, Journal, Late, Line, WorkerLines
from lorrery.simulator.placements import NotReadError, derive
from lorrery.simulator.replayed import ReplayedRequest
from lorrery.vocabulary import u32
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.output import LengthModel
from lorrery.worker.device.slow import SlowSpells
from lorrery.worker.device.work import StepOutcome


@dataclass(frozen=True, slots=True)
class ReplayParts:
    """What a replay is built from; made of the journal's settings as the live cluster's parts are of its own.

    Attributes:
        make_replica: of a worker, given what it announced and when the first one attached; called as they attach.
        make_gpu: the same for its device.
        slow_spells: of a worker, given what it announced and when the first one attached.
        make_adapter: by name, rank and version.
        adapters: those that the settings list.
        placement: the scheduler's, as it was at first.
        model: the base model's name; enters the token ids.
        length_model: where EOS falls by itself.
        echo: whether the answer is the prompt.
    """

    make_replica: Callable[[Record, int], Replica]
    make_gpu: Callable[[Record], MockGpu]
    slow_spells: Callable[[Record, int], SlowSpells]
    make_adapter: Callable[[str, int, int], Adapter]
    adapters: dict[str, Adapter]
    placement: Placement
    model: str
    length_model: LengthModel
    echo: bool = False


@dataclass(slots=True)
class Replayed:
    """What a replay compared, and what it found.

    Attributes:
        differences: (line of the journal, what is different); empty if the runs are equal.
        num_placed: times that a request went to a worker.
        num_derived: those among them that follow from what the placement read, and its errors that do.
        num_late: inputs that took effect late, whose boundaries were given.
        num_gaps: times that a worker stood still between two steps, which were given.
    """

    num_requests: int = 0
    num_workers: int = 0
    num_lost: int = 0
    num_cancels: int = 0
    num_placed: int = 0
    num_derived: int = 0
    num_plans: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_late: int = 0
    num_gaps: int = 0
    differences: list[tuple[int, str]] = field(default_factory=list)


class DifferenceError(Exception):
    """The simulation arrives at something else.

    Args:
        line: of the journal.
        whats: what is different.
    """

    def __init__(self, line: int, *whats: str) -> None:
        super().__init__(line, *whats)
        self.line = line
        self.whats = whats


def replay(journal: Journal, parts: ReplayParts) -> Replayed:
    """Replay a journal."""
    return _Replay(journal, parts).run()


class _Replay:
    def __init__(self, journal: Journal, parts: ReplayParts) -> None:
        self._journal, self._parts = journal, parts
        self._adapters = dict(parts.adapters)
        self._requests: dict[int, ReplayedRequest] = {}
        self._workers: list[_Worker] = []
        self._faults_from_ps: int | None = None
        self._result = Replayed()
        self._line = 1

    def run(self) -> Replayed:
        try:
            for line in self._journal.inputs:
                self._line = line.number
                self._take(line)
            for worker in self._workers:
                worker.run_to_stop()
        except DifferenceError as difference:
            self._result.differences = [(difference.line, what) for what in difference.whats]
        except (LookupError, ValueError, TypeError, AssertionError) as error:
            # No run can have been like this: the core or the device refuses it.
            self._result.differences = [(self._line, f"cannot be: {type(error).__name__}: {error}")]
        return self._result

    def _take(self, line: Line) -> None:
        content = line.content
        match line.type:
            case "request":
                self._result.num_requests += 1
                request = ReplayedRequest.read(content, self._adapter(content))
                self._requests[request.sequence.handle] = request
            case "placed":
                self._result.num_placed += 1
                request = self._requests[content["handle"]]
                if self._journal.notes_figures:
                    self._place(line, request.sequence)
                self._worker(content).give(content, request)
            case "cancel":
                self._result.num_cancels += 1
                if "worker" in content:
                    self._worker(content).give(content, None)
            case "recall":
                self._worker(content).give(content, None)
            case "attached":
                self._result.num_workers += 1
                self._attach(content["worker"], content["hello"], content["at_ps"])
            case "drained" | "lost":
                self._result.num_lost += line.type == "lost"
                self._worker(content).give_back(line)
            case "adapter" if not self._journal.has_versions:
                name, rank = content["adapter_id"], content["rank"]
                self._adapters[name] = self._parts.make_adapter(name, rank, 0)
            case "adapter_removed" if not self._journal.has_versions:
                del self._adapters[content["adapter_id"]]
            case "refused" if "candidates" in content:
                self._raise(line, self._requests[content["handle"]].sequence)
            case _:  # what else is refused leaves no trace, and requests say themselves which version they have
                pass

    def _adapter(self, request: Record) -> Adapter | None:
        if "adapter_id" not in request:
            return None
        if "adapter" in request:
            return self._parts.make_adapter(
                request["adapter_id"], request["adapter"]["rank"], request["adapter"]["version"]
            )
        return self._adapters[request["adapter_id"]]

    def _place(self, line: Line, sequence: Sequence) -> None:
        """Derive where a request goes, and among which workers there was a choice; a move is given."""
        content = line.content
        ready, fitting = self._fitting(sequence)
        if "moved_from" in content:
            name = self._worker(content).member.name
            _compare(line.number, "placed", {"could take it": name in fitting}, {"could take it": True})
            return
        figures = content.get("candidates", {})
        candidates = fitting if ready > 1 else []
        _compare(line.number, "placed", {"candidates": candidates}, {"candidates": list(figures)})
        if figures:
            self._result.num_derived += 1
            try:
                fitting = [derive(self._parts.placement, sequence, figures)]
            except NotReadError as error:
                raise DifferenceError(line.number, f"placed: the placement {error}") from None
        live = self._worker(content).member.name
        _compare(line.number, "placed", {"worker": fitting[0]}, {"worker": live})

    def _raise(self, line: Line, sequence: Sequence) -> None:
        """Derive that the placement raises, as it did live."""
        figures = line.content["candidates"]
        _, fitting = self._fitting(sequence)
        _compare(line.number, "refused", {"candidates": fitting}, {"candidates": list(figures)})
        try:
            name = derive(self._parts.placement, sequence, figures)
        except NotReadError as error:
            raise DifferenceError(line.number, f"refused: the placement {error}") from None
        except Exception:
            self._result.num_derived += 1
        else:
            raise DifferenceError(line.number, f"refused: the placement chooses {name} simulated, raised live")

    def _fitting(self, sequence: Sequence) -> tuple[int, list[str]]:
        """Return how many workers take new requests, and the names of those that could hold this one."""
        ready = [worker.member for worker in self._workers if worker.is_ready]
        return len(ready), [member.name for member in ready if member.replica.never_fits_reason(sequence) is None]

    def _attach(self, number: int, hello: Record, at_ps: int) -> None:
        lines = self._journal.workers[number]
        parts = self._parts
        if self._faults_from_ps is None:
            self._faults_from_ps = at_ps
        member = Member(hello["worker_id"], parts.make_replica(hello, self._faults_from_ps))
        spells = parts.slow_spells(hello, self._faults_from_ps)
        self._workers.append(_Worker(lines, member, parts.make_gpu(hello), spells, self._requests, parts, self._result))

    def _worker(self, content: Record) -> "_Worker":
        return self._workers[content["worker"]]


@dataclass(slots=True)
class _LateInput:
    content: Record
    request: ReplayedRequest | None
    late: Late


class _Worker:
    """One worker of the replay.

    Attributes:
        member: its batch and queue.
        is_ready: whether it has neither drained nor been lost.
        due_ps: when to plan next, if no plan runs; None: when something comes.
        position_ps: the boundary before the next step.
        boundary_ps: the end of the last step.
    """

    def __init__(
        self,
        lines: WorkerLines,
        member: Member,
        gpu: MockGpu,
        spells: SlowSpells,
        requests: dict[int, ReplayedRequest],
        parts: ReplayParts,
        result: Replayed,
    ) -> None:
        self.member = member
        self.is_ready = True
        self._lines, self._gpu, self._spells = lines, gpu, spells
        self._requests, self._parts, self._result = requests, parts, result
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
        self._planned_ps = -1
        self._position_ps = 0
        self._boundary_ps = 0

    # --- what is given ----------------------------------------------------------------------------------------------

    def give(self, content: Record, request: ReplayedRequest | None) -> None:
        """Take an arrival, or a cancel or recall (`request` is None), at its time."""
        late = self._lines.late.get(content["input"])
        if late is not None:
            self._result.num_late += 1
            where = self._never if late.boundary_ps is None else self._late
            where.append(_LateInput(content, request, late))
            return
        self._run(content["at_ps"])
        self._deliver(content, request, content["at_ps"])

    def _deliver(self, content: Record, request: ReplayedRequest | None, nudge_ps: int | None) -> None:
        """Put an input into the inbox, and let it be heeded from `nudge_ps` on; None: never."""
        member, at_ps, heeded = self.member, content["at_ps"], True
        if content["type"] == "recall":
            member.recall(content["handle"], content["to"], at_ps)
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
            self._due_ps = at_ps if self._due_ps is None else min(self._due_ps, at_ps)
        else:
            self._until_ps = at_ps if self._until_ps is None else min(self._until_ps, at_ps)

    def give_back(self, line: Line) -> None:
        """Drain or be lost, after the plans and steps that the journal has before this line."""
        content = line.content
        self.run_to_stop()
        lost = line.type == "lost"
        # What took effect before without a trace, and what never did.
        for inputs in (self._late, self._never):
            while inputs and (lost or inputs[0].late.line < line.number):
                late = inputs.popleft()
                self._deliver(late.content, late.request, None)
        if lost:
            sequences, events = self.member.lose(max(content["at_ps"], self._boundary_ps))
        else:
            sequences, events = self.member.withdraw_waiting()
        self.is_ready = False
        record = {
            "num_steps": self._num_steps,
            "boundary_ps": self._boundary_ps,
            "requeued": [[sequence.handle, sequence.produced_tokens] for sequence in sequences],
            **describe_events(events),
        }
        given = ("type", "worker", "at_ps")
        _compare(line.number, line.type, record, {k: v for k, v in content.items() if k not in given})
        self._stops.popleft()

    # --- running ----------------------------------------------------------------------------------------------------

    @property
    def _num_wanted(self) -> int:
        """Plans and steps before the next stop, or before the journal's end."""
        return self._stops[0] if self._stops else len(self._lines.expected)

    def run_to_stop(self) -> None:
        """Run until all is seen that the journal has before this worker's next stop, or before its own end."""
        num_wanted = self._num_wanted
        if not num_wanted:
            return
        last = self._lines.expected[num_wanted - 1]
        self._run(last.at_ps + 1)
        if self._num_seen < num_wanted:
            missing = self._lines.expected[self._num_seen]
            raise DifferenceError(missing.line, f"the simulation has no {_name(missing)} at {missing.at_ps} ps")

    def _run(self, before_ps: int) -> None:
        """Run through all boundaries before this time, but not beyond what the journal has before the next stop."""
        num_wanted = self._num_wanted
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
        """Deliver the first late input, and those that took effect with it, if their boundary comes next."""
        first, next_ps = self._late[0].late, self._next_ps()
        boundary_ps = first.boundary_ps
        assert boundary_ps is not None
        reached = next_ps is None or next_ps >= boundary_ps
        if first.missed:
            if self._planned_ps < boundary_ps:
                if reached:  # whatever planned there without them comes first
                    self._heed(boundary_ps)
                return False
            if self._plan is None and self._due_ps == boundary_ps:
                return False  # and so do those that planned there again
            self._plan = None  # the step under way is dropped
        elif not reached:
            return False
        while self._late and (late := self._late[0].late).boundary_ps == boundary_ps and late.missed == first.missed:
            given = self._late.popleft()
            self._deliver(given.content, given.request, boundary_ps)
        return True

    def _decide(self, at_ps: int) -> None:
        decision = self.member.plan(at_ps)
        self._planned_ps = at_ps
        record = self._decisions.record(decision)
        if record is not None:
            self._see_plan(at_ps, record)
        for event in decision.events:
            if isinstance(event, Recalled):
                self.member.let_go(event)
        for sequence in decision.leaves:
            self._gpu.leave(sequence.handle)
        if isinstance(decision, Idle):
            self._due_ps = decision.until_ps
            return
        for sequence in decision.joins:
            parts = self._parts
            self._gpu.join(self._requests[sequence.handle].device(parts.model, parts.length_model, echo=parts.echo))
        self._gpu.begin(decision.prefills, decode=decision.decode, hold=decision.hold)
        self._plan, self._due_ps, self._position_ps = decision, None, at_ps
        self._steps_left, self._until_ps = decision.max_steps, decision.until_ps

    def _next_ps(self) -> int | None:
        """Return when the next plan is due or the next step ends; a gap before it is given."""
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
        self._see_step(end_ps, outcome, events)
        self._position_ps = self._boundary_ps = end_ps
        self._steps_left -= 1
        over = bool(outcome.finished) and (not plan.hold or not self._gpu.num_unended)
        if over or not self._steps_left or (self._until_ps is not None and end_ps >= self._until_ps):
            self._plan, self._due_ps = None, end_ps

    # --- comparing --------------------------------------------------------------------------------------------------

    def _see_plan(self, at_ps: int, record: Record) -> None:
        expected = self._lines.expected[self._num_seen]
        if not isinstance(expected, ExpectedPlan):
            raise DifferenceError(expected.line, f"the simulation plans anew at {at_ps} ps, before this step")
        _compare(expected.line, "plan", {"at_ps": at_ps, **record}, {"at_ps": expected.at_ps, **expected.record})
        self._num_seen += 1
        self._result.num_plans += 1

    def _see_step(self, end_ps: int, outcome: StepOutcome, events: list[Event]) -> None:
        expected = self._lines.expected[self._num_seen]
        if not isinstance(expected, ExpectedStep):
            raise DifferenceError(expected.line, f"the simulation runs a step to {end_ps} ps before this plan")
        checksum = tokens_checksum(u32.pack_array(outcome.handles), u32.pack_array(outcome.token_ids))
        _compare(
            expected.line,
            "step",
            {"begin_ps": self._position_ps, "end_ps": end_ps, "tokens": checksum, **describe_events(events)},
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


def _compare(line: int, what: str, simulated: Record, live: Record) -> None:
    keys = [key for key in {**simulated, **live} if simulated.get(key) != live.get(key)]
    if keys:
        raise DifferenceError(
            line, *(f"{what}: {key} is {simulated.get(key)} simulated, {live.get(key)} live" for key in keys)
        )
