"""What a worker reports of its plan: checked step by step, and the tokens of each distributed to the routers.

With the steps comes what was handed to the worker meanwhile. The rule (docs/simulator.md): an input takes effect at the
first boundary at or after its stamp. The worker runs ahead of what the scheduler knows, so an Interrupt may reach it
when it has already sent the tokens of a further step; the input then takes effect at a later boundary. Such inputs are
counted, and recorded with the boundary at which they did.
"""

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lorrery.scheduler import wire_routers
from lorrery.scheduler.core.cluster_facts import Placed, Withdrawn
from lorrery.scheduler.core.inbox import Recall
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.facts import Input, InputLate, InputTaken
from lorrery.scheduler.messages import ProtocolError, StepReport
from lorrery.scheduler.routers import LiveRequest, RouterLink
from lorrery.vocabulary import u32
from lorrery.vocabulary.units import PS_PER_SECOND

MAX_AHEAD_PS = 3600 * PS_PER_SECOND
"""A worker's clock may be ahead of its scheduler's, but a step that ends over an hour from now has not been run."""


class RunningPlan:
    """The plan that a worker runs: its progress, and which step may come next.

    Args:
        plan: of the core.
        plan_id: its number on the stream.

    Attributes:
        steps_left: steps that may still come.
        interrupted: whether the worker has been sent an Interrupt.
    """

    __slots__ = ("interrupted", "plan", "plan_id", "steps_left")

    def __init__(self, plan: Plan, plan_id: int) -> None:
        self.plan = plan
        self.plan_id = plan_id
        self.steps_left = plan.max_steps
        self.interrupted = False

    @property
    def fresh(self) -> bool:
        """Whether no step of it has been reported."""
        return self.steps_left == self.plan.max_steps

    def expected_start_ps(self, boundary_ps: int) -> int:
        """Return when its next step begins, unless the worker stands still; `boundary_ps`: the end of its last one."""
        return self.plan.at_ps if self.steps_left == self.plan.max_steps else boundary_ps

    def check(self, step: StepReport, boundary_ps: int, now_ps: Callable[[], int]) -> None:
        """Check that a step follows the one before, belongs to the plan, and does not end in the distant future.

        Args:
            step: as reported by the worker.
            boundary_ps: the end of the one before.
            now_ps: reads the device clock; most steps end so soon after the one before that it need not be read.

        Raises:
            ProtocolError: it does not.
        """
        boundary_ps = self.expected_start_ps(boundary_ps)
        start_ps, end_ps = step.start_ps, step.ran.end_ps
        latest_ps = boundary_ps + MAX_AHEAD_PS
        if end_ps > latest_ps:
            latest_ps = max(latest_ps, now_ps() + MAX_AHEAD_PS)
        if not boundary_ps <= start_ps <= end_ps <= latest_ps:
            raise ProtocolError(
                f"the worker has a step from {start_ps} to {end_ps} ps; the one before ended at"
                f" {boundary_ps}, and {latest_ps} has not come"
            )
        if end_ps > start_ps and not self.steps_left:
            raise ProtocolError(f"the worker ran more than the {self.plan.max_steps} steps of plan {self.plan_id}")


def _check_handles(step: StepReport, plan: Plan, running: Running, ended: Collection[int], *, first: bool) -> None:
    """Check that a step has one token for each sequence that should get one.

    Args:
        step: as reported by the worker.
        plan: that it belongs to.
        running: the worker's batch before it.
        ended: see `Replica.ended`.
        first: whether it is the plan's first step.

    Raises:
        ProtocolError: it does not.
    """
    handles = u32.unpack(step.handles_u32)
    expected = {sequence.handle for sequence in running} if plan.decode else set[int]()
    if first:
        expected.update(chunk.sequence.handle for chunk in plan.prefills if chunk.samples)
    expected.difference_update(step.ran.silent, ended)
    if len(handles) != len(expected) or expected.difference(handles):
        other = next(iter(expected.symmetric_difference(handles)), handles[0] if handles else 0)
        raise ProtocolError(
            f"the worker has {len(handles)} tokens in a step that gives {len(expected)} sequences one each; sequence"
            f" {other} has none, more than one, or none to get"
        )


def _check_ends(step: StepReport, running: Running) -> None:
    """Check that a step ends only sequences of the batch, each once.

    Raises:
        ProtocolError: it does not.
    """
    ended = {handle for handle, _ in step.ran.finished}
    if len(ended) < len(step.ran.finished):
        raise ProtocolError(f"the worker reports {len(step.ran.finished)} ends of {len(ended)} sequences in one step")
    for handle in ended:
        if running.get(handle) is None:
            raise ProtocolError(f"the worker reports the end of sequence {handle}, which does not run there")


class FanOut:
    """Which tokens of a step go to which router; reused for as long as the same sequences get tokens.

    Args:
        handles_u32: sequences that got a token.
        lives: the scheduler's requests, by handle.
        running: the batch of the worker that made the tokens.

    Attributes:
        is_for_one_step: whether it must not be reused, since some of its tokens are repeated, and not sent.

    Raises:
        ProtocolError: a sequence does not run on this worker.
    """

    def __init__(self, handles_u32: bytes, lives: dict[int, LiveRequest], running: Running) -> None:
        self.handles_u32 = handles_u32
        handles = u32.unpack(handles_u32)
        self._lives: list[LiveRequest | None] = []
        self._outputs: list[array[int] | None] = []
        self._repeating: list[LiveRequest] = []
        places: dict[RouterLink, tuple[list[int], list[int]]] = {}
        for index, handle in enumerate(handles):
            live = lives.get(handle)
            self._lives.append(live)
            if live is None:  # cancelled while this plan runs
                self._outputs.append(None)
                continue
            if running.get(handle) is None:
                raise ProtocolError(f"the worker reports a token for sequence {handle}, which does not run there")
            self._outputs.append(live.token_ids)
            if live.num_repeats:
                live.num_repeats -= 1
                self._repeating.append(live)
                continue
            indices, router_handles = places.setdefault(live.router, ([], []))
            indices.append(index)
            router_handles.append(live.router_handle)
        self.is_for_one_step = bool(self._repeating)
        self._whole = len(places) == 1 and len(next(iter(places.values()))[0]) == len(handles)
        self._places = [
            (router, indices, u32.pack(router_handles)) for router, (indices, router_handles) in places.items()
        ]

    def check_budgets(self, step: StepReport) -> None:
        """Check that a step ends the sequences that have all their tokens with it.

        Raises:
            ProtocolError: one of them goes on.
        """
        ended = {handle for handle, _ in step.ran.finished}
        for handle, live in zip(u32.unpack(self.handles_u32), self._lives, strict=True):
            if live is not None and handle not in ended:
                most = live.sequence.max_new_tokens
                if len(live.token_ids) + 1 >= most:
                    raise ProtocolError(f"the worker continues sequence {handle}, which already has its {most} tokens")

    def append(self, token_ids_u32: bytes) -> None:
        """Append the step's tokens to the outputs.

        Raises:
            ProtocolError: not one token for each handle; none is appended then.
        """
        token_ids = u32.unpack(token_ids_u32)
        if len(token_ids) != len(self._outputs):
            raise ProtocolError(f"the worker reports {len(token_ids)} tokens for {len(self._outputs)} sequences")
        for output, token_id in zip(self._outputs, token_ids, strict=True):
            if output is not None:
                output.append(token_id)

    def take_back(self) -> None:
        """Remove the tokens appended last."""
        for live in self._repeating:
            live.num_repeats += 1
        for output in self._outputs:
            if output is not None:
                output.pop()

    def send(self, token_ids_u32: bytes, step_ps: int) -> None:
        """Send each router its part of the step's tokens."""
        for router, indices, router_handles_u32 in self._places:
            token_ids = token_ids_u32 if self._whole else wire_routers.take(token_ids_u32, indices)
            router.tokens(router_handles_u32, token_ids, step_ps)


class FanOuts:
    """The fan-outs of one worker's steps.

    Args:
        lives: the scheduler's requests, by handle.
    """

    def __init__(self, lives: dict[int, LiveRequest]) -> None:
        self._lives = lives
        self._last: FanOut | None = None

    def note(self, step: StepReport, running: RunningPlan, batch: Running, ended: Collection[int]) -> FanOut:
        """Check a step's tokens and ends, append the tokens, and return where they go.

        Args:
            step: as reported by the worker.
            running: the plan that it belongs to, before the step.
            batch: of the worker, before the step.
            ended: see `Replica.ended`.

        Raises:
            ProtocolError: they are not those of a step of this plan; no token is appended then.
        """
        fan_out, has_ends = self._last, bool(step.ran.finished)
        others = fan_out is None or fan_out.is_for_one_step or fan_out.handles_u32 != step.handles_u32
        if running.fresh or has_ends or others:
            _check_handles(step, running.plan, batch, ended, first=running.fresh)
        if fan_out is None or others:
            fan_out = self._last = FanOut(step.handles_u32, self._lives, batch)
        if has_ends:
            _check_ends(step, batch)
        if running.plan.hold or running.steps_left == 1:  # no other step may use up a sequence's budget
            fan_out.check_budgets(step)
        fan_out.append(step.token_ids_u32)
        return fan_out


NEVER_PS = -1
NOBODY = -1
"""Used in place of a handle for an input without a request."""


@dataclass(slots=True)
class Awaited:
    """An input that has to take effect on the worker.

    Attributes:
        number: of the input, on this worker.
        handle: of the request; `NOBODY`: of none.
        at_ps: its stamp.
        missed: number of plans made before it came that should have included it: those at the boundary of the last
            plan, if that is not before its stamp.
        due_ps: the boundary at which it should take effect, once known; `NEVER_PS`: that had passed when it came.
        overdue: whether the worker ran on beyond that boundary.
    """

    number: int
    handle: int
    at_ps: int
    missed: int
    due_ps: int | None = None
    overdue: bool = False

    @property
    def late(self) -> InputLate:
        """The fact that it took effect too late."""
        return InputLate(self.number, self.handle, self.missed)

    @property
    def never(self) -> InputLate:
        """The fact that it left before it took effect."""
        return InputLate(self.number, self.handle, self.missed, never=True)


class Inputs:
    """Tracks one worker's boundaries and the inputs that wait for one.

    Attributes:
        awaited: these inputs.
    """

    def __init__(self) -> None:
        self.awaited: list[Awaited] = []
        self._num = 0
        self._boundary_ps = NEVER_PS
        self._planned_ps = NEVER_PS
        self._num_planned = 0  # at that boundary

    @property
    def any_overdue(self) -> bool:
        """Whether an input should have taken effect already."""
        return any(one.overdue for one in self.awaited)

    def missed(self, at_ps: int) -> bool:
        """Return whether a plan has already been made that should have included an input of this time.

        That happens if the worker's clock is ahead of the scheduler's, as it may be on another host.
        """
        return at_ps <= self._planned_ps

    def take(self, what: Input, at_ps: int, *, expected: bool, lost: bool) -> InputTaken:
        """Wait for the effect of an input that has just come.

        Args:
            what: the input.
            at_ps: its stamp.
            expected: whether it should take effect at the next boundary.
            lost: whether the worker's stream is about to end, so that there will be no boundary.
        """
        number, self._num = self._num, self._num + 1
        has_passed = at_ps <= self._boundary_ps
        if expected and not lost:
            handle = _handle(what)
            one = Awaited(number, handle, at_ps, self._num_planned if self.missed(at_ps) else 0)
            if has_passed:
                one.due_ps, one.overdue = NEVER_PS, True
            self.awaited.append(one)
        return InputTaken(number, what, lost or (expected and has_passed))

    def stepped(self, end_ps: int) -> None:
        """Note that a step ended, and that the worker did not stop at the boundary before."""
        self._boundary_ps = end_ps
        for one in self.awaited:
            if one.due_ps is not None:
                one.overdue = True
            elif one.at_ps <= end_ps:
                one.due_ps = end_ps

    def planned(self, at_ps: int) -> list[InputLate]:
        """Record a plan at this boundary; return what takes effect there, but should have earlier."""
        if at_ps != self._planned_ps:
            self._num_planned = 0
            for one in self.awaited:
                one.missed = 0
        self._num_planned += 1
        self._boundary_ps = max(self._boundary_ps, at_ps)
        self._planned_ps = at_ps
        if not self.awaited:
            return []
        late = [one.late for one in self.awaited if one.at_ps <= at_ps and one.overdue]
        self.awaited = [one for one in self.awaited if one.at_ps > at_ps]
        return late

    def left(self, handles: Collection[int]) -> list[InputLate]:
        """Forget the inputs of requests that leave the worker; return those that should have taken effect earlier."""
        gone = [one for one in self.awaited if one.handle in handles]
        self.awaited = [one for one in self.awaited if one.handle not in handles]
        return [one.never for one in gone if one.overdue]

    def lost(self) -> list[InputLate]:
        """Return what should have taken effect before the worker was lost."""
        return [one.never for one in self.awaited if one.overdue]

    def undecided(self) -> None:
        """Note that an idle worker decides no more: its inputs should have taken effect by now."""
        for one in self.awaited:
            one.overdue = True


def _handle(what: Input) -> int:
    if isinstance(what, Recall):
        return what.handle
    return what.sequence.handle if isinstance(what, (Placed, Withdrawn)) else NOBODY
