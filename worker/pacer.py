"""Runs plans on the wall clock: steps begin and end at times of the scheduler's device clock.

A step ends at an absolute time: its start plus the modelled duration. The pacer sleeps until then and reads the clock
again when it wakes. Waking late changes no device time: the next step starts where this one ended. Only a worker that
stood still for longer than a whole step leaves a gap between two steps:

    start = max(previous boundary, now - duration)

The same rule places a plan's first step: a plan that arrives before the end of its own first step is in time.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lorrery.service.faults.kinds import FREEZE_WORKER
from lorrery.worker.device.batch import Batch, PrefillWork, StepOutcome
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.device.steptime import NO_SPELLS, Spells
from lorrery.worker.metrics import StepAccounts, StepRecord, WorkerMetrics
from lorrery.worker.timekeeping import Timer, open_timer


class Clock(Protocol):
    """Device time, as `service.clocks.DeviceClock` gives it."""

    def now_ps(self) -> int:
        """Return the device time now."""
        ...

    def to_monotonic(self, ps: int) -> float:
        """Return the time of `time.monotonic()`, in seconds, at which device time `ps` is reached."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run until the next decision; the wire's Plan.

    Attributes:
        plan_id: identifies the plan in outcomes and interrupts.
        start_ps: the boundary at which it was decided.
        max_steps: upper bound on the number of steps; 0: only apply the leaves and evictions.
        until_ps: hand back at the first boundary at or after this time.
        joins: sequences new to this worker.
        leaves: handles to forget; applied before the joins.
        prefills: the first step's prompt chunks.
        decode: whether every sequence past its prompt gets a token in each step.
        hold: finished sequences stay until the scheduler removes them; only the last finish ends the plan.
        wait_ps: how long the first step waits for adapters that are loading; added to its duration.
        adapter_loads: keys: ids with versions.
        adapter_evictions: keys.
    """

    plan_id: int
    start_ps: int
    max_steps: int
    until_ps: int | None = None
    joins: tuple[DeviceSequence, ...] = ()
    leaves: tuple[int, ...] = ()
    prefills: tuple[PrefillWork, ...] = ()
    decode: bool = False
    hold: bool = False
    wait_ps: int = 0
    adapter_loads: tuple[str, ...] = ()
    adapter_evictions: tuple[str, ...] = ()


class StepReport(NamedTuple):
    """One step's outcome; with `start_ps == end_ps` no step ran, and the plan ends at a boundary already reported.

    Attributes:
        plan_id: of the plan.
        start_ps: start of the step.
        end_ps: end of the step.
        outcome: tokens and finishes.
        hand_back: whether the plan is over.
    """

    plan_id: int
    start_ps: int
    end_ps: int
    outcome: StepOutcome
    hand_back: bool


LONGEST_SLEEP_SECONDS = 3600.0
"""Upper bound on one sleep: event loops have no timer for an infinite delay."""

NO_OUTCOME = StepOutcome(np.empty(0, np.uint32), np.empty(0, np.uint32), ())


class _Running:
    """The plan that runs.

    Attributes:
        plan: the plan.
        batch: what the current step computes.
        boundary_ps: the boundary before the current step.
        step_end_ps: end of the current step as last reported; None: it has not begun.
        start_ps: start of the current step; None: it waits for a freeze to end.
        duration_ps: duration of the current step.
        steps_left: steps that may still begin, the current one included.
        until_ps: hand back at the first boundary at or after this time.
    """

    __slots__ = ("batch", "boundary_ps", "duration_ps", "plan", "start_ps", "step_end_ps", "steps_left", "until_ps")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.batch = Batch()
        self.boundary_ps = plan.start_ps
        self.step_end_ps: int | None = None
        self.start_ps: int | None = None
        self.duration_ps = 0
        self.steps_left = plan.max_steps
        self.until_ps = math.inf if plan.until_ps is None else plan.until_ps


class Pacer:
    """Runs one plan after another.

    Args:
        gpu: the GPU that runs the steps.
        clock: this worker's estimate of the scheduler's device clock.
        metrics: of the worker.
        report: called at each step's end; must not block.
        spells: when steps take longer than the device model says, or do not begin.
    """

    def __init__(
        self,
        gpu: MockGpu,
        clock: Clock,
        metrics: WorkerMetrics,
        report: Callable[[StepReport], None],
        spells: Spells = NO_SPELLS,
    ) -> None:
        self._gpu, self._clock, self._metrics, self._report = gpu, clock, metrics, report
        self._spells = spells
        self._accounts = StepAccounts(gpu, metrics, spells)
        self._running: _Running | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # only while `run` runs
        self._timer: Timer | None = None  # only while `run` runs
        self._soon: asyncio.Handle | None = None
        self._failed: asyncio.Future[None] | None = None
        self._last_report_ps = 0  # when the last step's end was reported
        self._last_end_ps = -1  # when it was due
        self.empty = asyncio.Event()
        """Set while no sequence is here."""
        self.empty.set()

    def start(self, plan: Plan) -> None:
        """Take the next plan; its first step begins at once. A plan without a step is over at once, without a report.

        Raises:
            ValueError: the previous plan is not over, or this one does not fit the state of the device.
        """
        if self._running is not None:
            raise ValueError(f"plan {plan.plan_id} came while plan {self._running.plan.plan_id} runs")
        if not plan.max_steps and (plan.joins or plan.prefills):
            raise ValueError(f"plan {plan.plan_id} has work and no step for it")
        for handle in plan.leaves:
            self._gpu.leave(handle)
        for sequence in plan.joins:
            self._gpu.join(sequence)
        self._gpu.begin(plan.prefills, decode=plan.decode, hold=plan.hold)
        self._metrics.adapters_changed(plan.adapter_loads, plan.adapter_evictions)
        self._metrics.hold(len(self._gpu), self._gpu.kv_tokens)
        self._note_sequences()
        if plan.max_steps:
            self._running = _Running(plan)
            self._look_soon()

    def interrupt(self, plan_id: int, at_ps: int) -> None:
        """End the plan at the first boundary at or after `at_ps` whose next step has not been reported.

        The last reported boundary qualifies: the current step is then dropped, with no effect. Does nothing if the plan
        is over.
        """
        running = self._running
        if running is None or running.plan.plan_id != plan_id:
            return
        if at_ps > running.boundary_ps:
            running.until_ps = min(running.until_ps, at_ps)
            return
        self._running = None
        boundary_ps = running.boundary_ps
        self._report(StepReport(plan_id, boundary_ps, boundary_ps, NO_OUTCOME, hand_back=True))
        self.count()
        self._look_soon()

    @property
    def progress(self) -> tuple[int, int] | None:
        """The id of the plan that runs and the end of its current step; None: no step has begun."""
        running = self._running
        if running is None or running.step_end_ps is None:
            return None
        return running.plan.plan_id, running.step_end_ps

    @property
    def boundary_ps(self) -> int:
        """The boundary before the current step, or the end of the last one."""
        return self._last_end_ps if self._running is None else self._running.boundary_ps

    def use(self, spells: Spells) -> None:
        """Set when the GPU is slow or frozen; the spells may differ from the previous ones after `boundary_ps` only."""
        self.count()
        self._spells = self._accounts.spells = spells
        self._look_soon()

    def count(self) -> None:
        """Count all finished steps in the metrics."""
        self._accounts.count()

    async def run(self) -> None:
        """Run the plans passed to `start`, until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._timer = open_timer(self._loop, self._look)
        self._failed = self._loop.create_future()
        self._look_soon()
        try:
            await self._failed
        finally:
            self._disarm()
            self._timer.close()
            self._loop = self._timer = None
            self.count()

    # Callbacks instead of a task that sleeps, which would cost one future and one task switch more per step.

    def _look_soon(self) -> None:
        """Call `_look` in the next iteration of the event loop."""
        if self._loop is not None:
            self._disarm()
            self._soon = self._loop.call_soon(self._look)

    def _look_at(self, at_seconds: float) -> None:
        """Call `_look` at this time of the monotonic clock."""
        assert self._timer is not None
        self._timer.set(at_seconds)

    def _disarm(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._timer is not None:
            self._timer.clear()

    def _look(self) -> None:
        self._soon = None
        try:
            self._go_on()
            if self._soon is None and self._accounts.due:  # else a step has just ended, or there are few to count
                self._accounts.count()
        except Exception as error:  # `run` raises it
            assert self._failed is not None
            if not self._failed.done():
                self._failed.set_exception(error)

    def _go_on(self) -> None:
        """Finish the current step if it is due, or begin one and wait for its end.

        Whatever follows a step's end waits for the next iteration of the event loop. Until then, other GPUs of the
        process whose steps end at the same time report theirs, and the streams are read and written even if all GPUs
        are late.
        """
        running = self._running
        if running is None:
            return
        if running.step_end_ps is None:
            self._begin_step(running)
        if running.start_ps is None and not self._thaw(running):
            return
        assert running.start_ps is not None
        end_ps = running.start_ps + running.duration_ps
        due_seconds = self._clock.to_monotonic(end_ps)
        lag_seconds = time.monotonic() - due_seconds
        if lag_seconds < 0:
            self._look_at(due_seconds)
            return
        self._finish_step(running, running.start_ps, end_ps, lag_seconds)
        if self._soon is None and self._loop is not None:
            self._soon = self._loop.call_soon(self._look)

    def _begin_step(self, running: _Running) -> None:
        duration_ps = self._spells.stretch(self._gpu.step_ps(), running.boundary_ps)
        if running.steps_left == running.plan.max_steps:
            duration_ps += running.plan.wait_ps
        start_ps = max(running.boundary_ps, self._clock.now_ps() - duration_ps)
        running.duration_ps, running.step_end_ps = duration_ps, start_ps + duration_ps
        running.start_ps = start_ps
        running.batch = self._gpu.batch()
        if self._spells.thaw_ps(running.boundary_ps) > running.boundary_ps:
            # A GPU that hangs reports nothing: the end of the step that the worker has already reported stands.
            self._metrics.fault(FREEZE_WORKER)
            running.start_ps = None

    def _thaw(self, running: _Running) -> bool:
        """Return whether a frozen GPU may go on; otherwise set the timer for the end of the freeze."""
        thaw_ps = self._spells.thaw_ps(running.boundary_ps)
        thaw_seconds, now_seconds = self._clock.to_monotonic(thaw_ps), time.monotonic()
        if thaw_seconds > now_seconds:
            self._look_at(min(thaw_seconds, now_seconds + LONGEST_SLEEP_SECONDS))
            return False
        running.start_ps = max(thaw_ps, self._clock.now_ps() - running.duration_ps)
        return True

    def _finish_step(self, running: _Running, start_ps: int, end_ps: int, lag_seconds: float) -> None:
        outcome = self._gpu.advance()
        gap_ps = start_ps - running.boundary_ps
        running.boundary_ps, running.step_end_ps = end_ps, None
        running.steps_left -= 1
        ended = bool(outcome.finished) and (not running.plan.hold or not self._gpu.num_unended)
        hand_back = running.steps_left == 0 or ended or end_ps >= running.until_ps
        if hand_back:
            self._running = None
        self._report(StepReport(running.plan.plan_id, start_ps, end_ps, outcome, hand_back))

        now_ps = self._clock.now_ps()
        follows_on = start_ps == self._last_end_ps
        actual_ps = now_ps - (self._last_report_ps if follows_on else start_ps)
        self._last_report_ps, self._last_end_ps = now_ps, end_ps
        self._accounts.ended(
            StepRecord(running.batch, running.plan.prefills, outcome, gap_ps, start_ps, end_ps, actual_ps, lag_seconds),
            last=hand_back,
        )
        if outcome.finished:
            self._note_sequences()

    def _note_sequences(self) -> None:
        if len(self._gpu):
            self.empty.clear()
        else:
            self.empty.set()
