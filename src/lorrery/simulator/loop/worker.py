"""One worker under the virtual clock: its replica, its GPU, the running plan, and the spans of steps that it publishes.

A plan runs in one jump to its last step, or to the first boundary at or after an event that can change it. When the
plan starts, the end times of its steps and the sequences that finish are known; they are committed when the clock
reaches them, and published as a `StepSpan`.

A subscriber with an attribute `reads_prompts` that is false uses neither the prefills nor the waiting count of spans;
if that goes for all, several chunks of one long prompt may run in one jump, each still told as its own span.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lorrery.scheduler.core.facts import Event, Facts
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.replica import Replica
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.state import Clock
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.steptime import Pace, StepTimeModel


@dataclass(slots=True)
class StepSpan:
    """Consecutive steps of one plan; only the first has the plan's prefills.

    Attributes:
        worker: that ran them.
        plan: of these steps.
        start_ps: when the first began, after any wait for adapters.
        num_steps: number of steps.
        first_ps: duration of the first.
        slope_ps: increase of the duration from each step to the next.
        end_ps: when the last ended.
        num_decodes: sequences that get a token in each step, without the first step's newcomers.
        kv_tokens: in the cache before the first, of all sequences.
        num_waiting: sequences in the worker's queue.
        newcomers: sequences whose prompt ended with the first step and that go on to decode.
        silent: sequences that end with the last step and get no token from it.
        gone: sequences whose clients left during the last step.
    """

    worker: str
    plan: Plan
    start_ps: int
    num_steps: int
    first_ps: int
    slope_ps: int
    end_ps: int
    num_decodes: int
    kv_tokens: int
    num_waiting: int
    newcomers: Sequence[int] = ()
    silent: Collection[int] = ()
    gone: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The part of a run that counts begins; the warm-up is over."""


@dataclass(slots=True)
class Totals:
    """Counters of a run."""

    num_steps: int = 0
    num_plans: int = 0
    busy_ps: int = 0
    end_ps: int = 0


class SimulatedWorker:
    """A worker of a simulation.

    Args:
        name: its id.
        make_replica: builds its replica, again each time the worker returns after a loss.
        step_time: step-time model of its device.
        shard: index of the scheduler it belongs to.
        pool_tokens: size of its KV pool, for the check of a request's length; by default any length fits.
        pace: the step times it announces; None: it announces none.

    Attributes:
        member: its scheduler's record of it, kept after a loss until the worker returns.
        attached: whether it is attached to its scheduler.
        order: position in order of attaching; breaks ties between boundaries at one time.
        clock: the simulation's clock.
        step_time: model of its device without a slow-down.
        boundary_ps: the last boundary at which it planned.
        frozen_until_ps: no step begins before this time.
        facts: takes the steps that it runs.
        publishes_steps: whether anybody wants them.
        runs_chunks: whether consecutive chunks of one prompt run in one jump; False if a subscriber reads each of them.
        end_ps: its next boundary, or the current one; `NEVER`: it has none.
        life: number of times its process has ended; a delayed return applies only within the same life.
    """

    __slots__ = (
        "_gone",
        "_make_replica",
        "_may_be_silent",
        "attached",
        "boundary_ps",
        "clock",
        "end_ps",
        "facts",
        "frozen_until_ps",
        "gpu",
        "life",
        "member",
        "name",
        "order",
        "pace",
        "plan",
        "pool_tokens",
        "publishes_steps",
        "replica",
        "runs_chunks",
        "shard",
        "start_ps",
        "step_time",
        "steps",
        "totals",
    )

    def __init__(
        self,
        name: str,
        make_replica: Callable[[], Replica],
        step_time: StepTimeModel,
        shard: int = 0,
        pool_tokens: int = NEVER,
        pace: Pace | None = None,
    ) -> None:
        self.name = name
        self.pace = pace
        self.step_time = step_time
        self.gpu = MockGpu(step_time)
        self.shard = shard
        self.pool_tokens = pool_tokens
        self.order = 0
        self.clock = Clock()
        self.plan: Plan | None = None
        self.start_ps = 0
        self.steps = 0
        self.end_ps = NEVER
        self.boundary_ps = 0
        self.frozen_until_ps = 0
        self.life = 0
        self.totals = Totals()
        self.facts = Facts()
        self.publishes_steps = False
        self.runs_chunks = True
        self._make_replica = make_replica
        self._may_be_silent = False
        self._gone: set[int] = set()  # sequences whose clients have left; those that run take part in one more step
        self.attached = False
        self.replica = make_replica()
        self.member = Member(name, self.replica, pool_tokens, pace)

    def renew(self, at_ps: int) -> None:
        """Return after a loss, with an empty replica."""
        self.replica = self._make_replica()
        self.member = Member(self.name, self.replica, self.pool_tokens, self.pace)
        self.boundary_ps = at_ps

    def start(self, plan: Plan, at_ps: int, requests: dict[int, SimulatedRequest], *, one_step: bool) -> int:
        """Start running a plan; return when it ends if nothing interrupts it.

        Args:
            plan: from the replica.
            at_ps: now.
            requests: the simulation's, by handle.
            one_step: end the plan after every step.
        """
        gpu = self.gpu
        if plan.joins:
            for sequence in plan.joins:
                request = requests[sequence.handle]
                gpu.join(request.device())
                if request.ending.extra_step:
                    self._may_be_silent = True
        gpu.begin(plan.prefills, decode=plan.decode, hold=plan.hold)
        start_ps = (max(self.frozen_until_ps, at_ps)) + plan.wait_ps
        until_ps = plan.until_ps
        duration_ps = None if until_ps is None else until_ps - start_ps
        if one_step:
            steps, total_ps = 1, gpu.step_ps()
        else:
            steps, total_ps = gpu.run(plan.max_steps, duration_ps, plan.chunk_steps if self.runs_chunks else 1)
        self.start_ps, self.plan, self.steps = start_ps, plan, steps
        return start_ps + total_ps

    def interrupt(self, at_ps: int) -> int | None:
        """Cut the plan at its next boundary; return that boundary, or None if the plan already ends there."""
        if self.steps == 1 or self.end_ps <= at_ps:
            return None
        self.steps = self._steps_until_next(at_ps)
        return self.start_ps + self.gpu.total_ps(self.steps)

    def finish(self, plan: Plan, at_ps: int, requests: dict[int, SimulatedRequest]) -> list[Event]:
        """End the plan at this boundary: run and commit its remaining steps."""
        steps = self.steps
        span = self._span(plan, steps, at_ps) if self.publishes_steps else None
        before_ps = self._last_boundary_before(plan, at_ps) if self._may_be_silent else 0
        finished = self.gpu.jump(steps)
        totals = self.totals
        totals.num_steps += steps
        busy_ps = at_ps - self.start_ps
        totals.busy_ps += busy_ps
        totals.end_ps = at_ps
        self.plan = None
        if span is not None:
            self._tell(span, finished, requests)
        if not finished:
            return self.member.commit(plan, Ran(steps, at_ps, busy_ps=busy_ps))
        ran = Ran(steps, at_ps, finished, busy_ps=busy_ps)
        if plan.hold:
            for handle, _ in finished:
                requests[handle].last_token_ps = at_ps
        if self._may_be_silent:
            ran.silent = frozenset(handle for handle, _ in finished if requests[handle].ending.extra_step)
            for handle in ran.silent:
                requests[handle].last_token_ps = before_ps
        return self.member.commit(plan, ran)

    def _last_boundary_before(self, plan: Plan, at_ps: int) -> int:
        """Return the start of the plan's last step, which ends now."""
        if self.steps > 1:
            return at_ps - self.gpu.total_ps(self.steps) + self.gpu.total_ps(self.steps - 1)
        return plan.at_ps if self.start_ps == plan.at_ps + plan.wait_ps else self.start_ps

    def show(self, at_ps: int) -> None:
        """Update the placement's view of this worker to now: count the ended steps of the running plan.

        With a prefix cache the steps are committed instead, because the cache changes with them.
        """
        if self.plan is None or self.steps == 1:
            self.member.candidate.uncommitted_steps = 0
        elif self.replica.prefix_cache is not None:
            self.catch_up(at_ps)
            self.member.candidate.uncommitted_steps = 0
        else:
            self.member.candidate.uncommitted_steps = self._steps_ended(at_ps) if self.plan.decode else 0

    def tokens_given(self, request: SimulatedRequest, at_ps: int) -> int:
        """Return the tokens that a request of this worker has received so far, those of earlier batches included."""
        running = self.replica.running
        if running.get(request.handle) is None:
            return request.produced_tokens
        tokens = request.produced_tokens + self.replica.output_tokens(request.sequence)
        goes_on = request.handle not in running.prefilling and request.handle not in running.held
        if goes_on and self.plan is not None and self.plan.decode:
            tokens += self._steps_ended(at_ps)
        return tokens

    def _steps_ended(self, at_ps: int) -> int:
        if self.plan is None or self.steps == 1:
            return 0
        return self._steps_until_next(at_ps) - 1

    def _steps_until_next(self, at_ps: int) -> int:
        """Return how many of the plan's steps end at or before its next boundary.

        A boundary at exactly this time counts as passed or not by the order of workers, as if run step by step.
        """
        passed = self.clock.has_passed(at_ps, self.order)
        return self.gpu.steps_to_cover(at_ps + passed - self.start_ps, self.steps)

    def catch_up(self, at_ps: int) -> None:
        """Commit the steps of the running plan that ended before now; the rest of the plan goes on."""
        plan = self.plan
        if plan is None or not (done := self._steps_ended(at_ps)):
            return
        end_ps = self.start_ps + self.gpu.total_ps(done)
        if self.publishes_steps:
            self.facts.publish((self._span(plan, done, end_ps),), end_ps, self.member)
        finished = self.gpu.jump(done)
        assert not finished
        self.totals.num_steps += done
        self.totals.end_ps = end_ps
        busy_ps = end_ps - self.start_ps
        self.totals.busy_ps += busy_ps
        self.start_ps = end_ps
        self.steps -= done
        events = self.member.commit(plan, Ran(done, end_ps, busy_ps=busy_ps))
        assert not events
        self.replica.make_room(plan)

    def _span(self, plan: Plan, num_steps: int, end_ps: int) -> StepSpan:
        """Return the span of these steps; if they form no straight line, of the last, and report the others."""
        gpu = self.gpu
        num_decodes = gpu.num_decoding if plan.decode else 0
        start_ps, first_ps, slope_ps, kv_tokens = self.start_ps, gpu.step_ps(), 0, gpu.kv_tokens
        if num_steps > 1:
            if plan.prefills or gpu.is_uneven:
                grown = 0 if plan.prefills else num_decodes
                start_ps = self._tell_steps(plan, num_steps - 1, num_decodes, grown)
                kv_tokens += (num_steps - 1) * grown
                num_steps, first_ps = 1, end_ps - start_ps
            else:
                slope_ps = gpu.total_ps(2) - 2 * first_ps
        return StepSpan(
            self.name,
            plan,
            start_ps,
            num_steps,
            first_ps,
            slope_ps,
            end_ps,
            num_decodes,
            kv_tokens,
            self.replica.num_queued,
        )

    def _tell_steps(self, plan: Plan, num_steps: int, num_decodes: int, grown: int) -> int:
        """Report steps one by one, as they have no constant slope; return when they end."""
        begin_ps = self.start_ps
        for step in range(1, num_steps + 1):
            end_ps = self.start_ps + self.gpu.total_ps(step)
            took_ps, num_waiting = end_ps - begin_ps, self.replica.num_queued
            kv_tokens = self.gpu.kv_tokens + (step - 1) * grown
            span = StepSpan(self.name, plan, begin_ps, 1, took_ps, 0, end_ps, num_decodes, kv_tokens, num_waiting)
            self.facts.publish((span,), end_ps, self.member)
            begin_ps = end_ps
        return begin_ps

    def _tell(
        self, span: StepSpan, finished: tuple[tuple[int, FinishReason], ...], requests: dict[int, SimulatedRequest]
    ) -> None:
        ended = {handle for handle, _ in finished}
        if span.plan.prefills:
            span.newcomers = [
                chunk.sequence.handle
                for chunk in span.plan.prefills
                if chunk.samples and chunk.sequence.handle not in ended
            ]
        if self._may_be_silent:
            span.silent = {handle for handle in ended if requests[handle].ending.extra_step}
        if self._gone:
            running = self.replica.running
            self._gone = {handle for handle in self._gone if running.get(handle) is not None}
            computed = {chunk.sequence.handle for chunk in span.plan.prefills}
            span.gone = self._gone.difference(running.held, running.prefilling.keys() - computed)
        self.facts.publish((span,), span.end_ps, self.member)

    def client_left(self, handle: int) -> None:
        """Note for spans of steps that nobody waits any more for a sequence of this worker."""
        if self.publishes_steps:
            self._gone.add(handle)
