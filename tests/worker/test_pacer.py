"""When steps begin and end, on a clock that moves only while the pacer sleeps."""

import asyncio
import time
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry

from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.batch import Batch, PrefillWork
from lorrery.worker.device.constant import OVERHEAD_PS, LlmMock
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.output import Ending
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.device.steptime import NO_SPELLS, Spells
from lorrery.worker.metrics import WorkerMetrics
from lorrery.worker.pacer import Pacer, Plan, StepReport

pytestmark = pytest.mark.timing

ENDLESS = DeviceSequence(1, 1, 0, 5, Ending(10**6, FinishReason.LENGTH))
START_PS = 10**15


class SleepersClock:
    """Jumps to the time that is slept for, and past it by what `oversleep_ps` says of that sleep (counted from 0)."""

    def __init__(self, oversleep_ps: Callable[[int], int]) -> None:
        self.now = START_PS
        self._oversleep_ps = oversleep_ps
        self._num_sleeps = 0

    def now_ps(self) -> int:
        return self.now

    def to_monotonic(self, ps: int) -> float:
        if ps <= self.now:
            return time.monotonic() - (self.now - ps) / 1e12
        self.now = ps + self._oversleep_ps(self._num_sleeps)
        self._num_sleeps += 1
        return time.monotonic() + 0.001


class Bench:
    """A pacer, and what it reports; `on_report` sees each report as it comes."""

    def __init__(
        self,
        oversleep_ps: Callable[[int], int] = lambda _sleep: 0,
        on_report: Callable[["Bench", StepReport], None] = lambda _bench, _report: None,
        spells: Spells = NO_SPELLS,
        clock: SleepersClock | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.clock = clock or SleepersClock(oversleep_ps)
        self.reports: list[StepReport] = []
        self.over = asyncio.Event()
        self._on_report = on_report
        metrics = WorkerMetrics(self.registry, "worker", 1000)
        self.pacer = Pacer(MockGpu(LlmMock()), self.clock, metrics, self._report, spells)

    def _report(self, report: StepReport) -> None:
        self.reports.append(report)
        self._on_report(self, report)
        if report.hand_back:
            self.over.set()

    async def run(self, max_steps: int, start_ps: int = START_PS, until_ps: int | None = None) -> list[StepReport]:
        """Run one plan of a single sequence to its hand-back."""
        running = asyncio.create_task(self.pacer.run())
        try:
            prefills = (PrefillWork(1, 1, 0, samples=True),)
            self.pacer.start(Plan(1, start_ps, max_steps, until_ps, (ENDLESS,), (), prefills, decode=True))
            async with asyncio.timeout(20):
                await self.over.wait()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return self.reports

    def gaps(self) -> list[int]:
        return [after.start_ps - before.end_ps for before, after in pairwise(self.reports)]

    def durations(self) -> list[int]:
        return [report.end_ps - report.start_ps for report in self.reports]

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"lorrery_worker_{name}", {"worker": "worker", **labels})


def step_ps(length: int) -> int:
    """llm-mock's step of one sequence that is `length` tokens long with its newest."""
    return LlmMock().step_ps(Batch((), 1, length - 1, length - 1))


async def test_steps_follow_one_another_and_take_what_the_model_says():
    bench = Bench()
    reports = await bench.run(5)
    assert reports[0].start_ps == START_PS
    assert bench.gaps() == [0] * 4
    assert bench.durations() == [step_ps(length) for length in (1, 2, 3, 4, 5)]
    assert [report.hand_back for report in reports] == [False] * 4 + [True]


class Bell:
    """A timer that the test rings."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.ring, self.num_set = ring, 0

    def set(self, _at_seconds: float) -> None:
        self.num_set += 1

    def clear(self) -> None:
        pass

    close = clear


class HeldClock(SleepersClock):
    """Stands still until it is moved."""

    def to_monotonic(self, ps: int) -> float:
        return time.monotonic() + (ps - self.now) / 1e12


async def test_gpus_whose_steps_end_together_tell_them_before_any_begins_the_next(monkeypatch):
    bells: list[Bell] = []
    monkeypatch.setattr("lorrery.worker.pacer.open_timer", lambda _loop, ring: bells.append(Bell(ring)) or bells[-1])
    clock = HeldClock(lambda _sleep: 0)
    clock.now += step_ps(1) // 2  # no step is over before the clock moves
    benches = [Bench(clock=clock), Bench(clock=clock)]
    tasks = [asyncio.create_task(bench.run(5)) for bench in benches]
    while [bell.num_set for bell in bells] != [1, 1]:  # noqa: ASYNC110  turns of the loop are awaited
        await asyncio.sleep(0)
    clock.now = START_PS + step_ps(1)
    for bell in bells:
        bell.ring()
    assert [len(bench.reports) for bench in benches] == [1, 1]
    assert [bench.pacer.progress for bench in benches] == [None, None]
    await asyncio.sleep(0)
    assert [bell.num_set for bell in bells] == [2, 2]
    assert [bench.pacer.progress for bench in benches] == [(1, START_PS + step_ps(1) + step_ps(2))] * 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_steps_that_begin_in_a_slow_spell_are_stretched():
    second, fourth = START_PS + step_ps(1), START_PS + step_ps(1) + 2 * step_ps(2) + 2 * step_ps(3)
    bench = Bench(spells=Spells([(second - 5, fourth, Fraction(2))]))
    await bench.run(4)
    assert bench.durations() == [step_ps(1), 2 * step_ps(2), 2 * step_ps(3), step_ps(4)]
    assert bench.gaps() == [0] * 3
    assert bench.metric("step_modelled_seconds_sum") == pytest.approx(sum(bench.durations()) / 1e12)


@pytest.mark.parametrize("oversleep_ps", [0, OVERHEAD_PS // 2])
async def test_a_freeze_makes_a_gap_and_does_not_change_what_was_said_of_the_steps_end(oversleep_ps: int):
    second = START_PS + step_ps(1)
    thaw_ps = second + 40 * OVERHEAD_PS
    told: list[tuple[int, int] | None] = []

    def look(_sleep: int) -> int:
        told.append(bench.pacer.progress)
        return oversleep_ps  # a late wake-up changes no device time

    bench = Bench(look, spells=Spells(frozen=[(second - 5, thaw_ps)]))
    await bench.run(4)
    assert bench.durations() == [step_ps(1), step_ps(2), step_ps(3), step_ps(4)]
    assert bench.gaps() == [thaw_ps - second, 0, 0]
    assert (1, second + step_ps(2)) in told
    assert (1, thaw_ps + step_ps(2)) not in told
    assert bench.metric("faults_total", kind="freeze_worker") == 1


async def test_late_wake_ups_change_no_device_time():
    punctual, late = Bench(), Bench(oversleep_ps=lambda _sleep: OVERHEAD_PS // 2)
    on_time = [(r.start_ps, r.end_ps) for r in await punctual.run(6)]
    assert [(r.start_ps, r.end_ps) for r in await late.run(6)] == on_time
    assert late.metric("gaps_total") == 0
    assert late.metric("lag_seconds_sum") >= 3 * OVERHEAD_PS / 1e12


async def test_stall_makes_one_gap_and_leaves_every_step_its_length():
    bench = Bench(oversleep_ps=lambda sleep: 100 * OVERHEAD_PS if sleep == 2 else 0)
    await bench.run(6)
    # The step under way ends when it was due; the next one has just ended when the worker goes on.
    stalled_until_ps = bench.reports[2].end_ps + 100 * OVERHEAD_PS
    assert bench.reports[3].end_ps == stalled_until_ps
    assert bench.gaps() == [0, 0, 100 * OVERHEAD_PS - step_ps(4), 0, 0]
    assert bench.durations() == [step_ps(length) for length in (1, 2, 3, 4, 5, 6)]
    assert bench.metric("gaps_total") == 1
    assert bench.metric("gap_seconds_total") == pytest.approx(bench.gaps()[2] / 1e12)


async def test_plan_that_comes_before_the_end_of_its_first_step_is_in_time():
    bench = Bench()
    start_ps = START_PS - step_ps(1) + 1
    reports = await bench.run(2, start_ps)
    assert reports[0].start_ps == start_ps
    assert bench.metric("gaps_total") == 0


async def test_plan_that_comes_later_is_caught_up_with_by_one_step():
    bench = Bench()
    reports = await bench.run(2, START_PS - 5 * OVERHEAD_PS)
    assert reports[0].end_ps == START_PS
    assert bench.durations() == [step_ps(1), step_ps(2)]
    assert bench.gaps() == [0]
    assert bench.metric("gaps_total") == 1


@pytest.mark.parametrize(("until", "num_steps"), [(0, 1), (1, 1), (2, 2), (3, 3)])
async def test_until_ends_the_plan_at_the_first_boundary_at_or_after_it(until, num_steps):
    boundary_ps = START_PS + sum(step_ps(length) for length in range(1, until + 1))
    assert len(await Bench().run(9, until_ps=boundary_ps)) == num_steps
    assert len(await Bench().run(9, until_ps=boundary_ps + 1)) == until + 1


async def test_interrupt_ahead_ends_the_plan_at_the_first_boundary_after_it():
    def interrupt_in_the_third_step(bench: Bench, report: StepReport) -> None:
        if len(bench.reports) == 1:
            bench.pacer.interrupt(1, report.end_ps + step_ps(2) + 1)

    bench = Bench(on_report=interrupt_in_the_third_step)
    assert len(await bench.run(9)) == 3


async def test_interrupt_for_a_later_boundary_leaves_an_earlier_until_as_it_is():
    def interrupt_beyond_the_fourth_step(bench: Bench, report: StepReport) -> None:
        if len(bench.reports) == 1:
            bench.pacer.interrupt(1, report.end_ps + step_ps(2) + step_ps(3) + step_ps(4))

    bench = Bench(on_report=interrupt_beyond_the_fourth_step)
    assert len(await bench.run(9, until_ps=START_PS + step_ps(1) + step_ps(2))) == 2


async def test_interrupt_for_a_boundary_just_told_drops_the_step_under_way():
    def interrupt_at_the_second_boundary(bench: Bench, report: StepReport) -> None:
        if len(bench.reports) == 2:
            asyncio.get_running_loop().call_soon(bench.pacer.interrupt, 1, report.end_ps)

    bench = Bench(on_report=interrupt_at_the_second_boundary)
    _, second, none = await bench.run(9)
    assert (none.start_ps, none.end_ps, none.hand_back) == (second.end_ps, second.end_ps, True)
    assert len(none.outcome.handles) == 0
    assert bench.metric("output_tokens_total") == 2


async def test_interrupt_of_another_plan_is_ignored():
    def interrupt(bench: Bench, _report: StepReport) -> None:
        bench.pacer.interrupt(7, 0)

    assert len(await Bench(on_report=interrupt).run(4)) == 4


async def test_every_step_is_counted_with_its_lag_and_both_its_times():
    bench = Bench()
    await bench.run(5)
    for name in ("step_modelled_seconds", "step_actual_seconds", "lag_seconds", "batch_size", "batch_tokens"):
        assert bench.metric(f"{name}_count") == 5
    assert bench.metric("step_modelled_seconds_sum") == pytest.approx(sum(bench.durations()) / 1e12)
    assert bench.metric("step_actual_seconds_sum") == pytest.approx(sum(bench.durations()) / 1e12)


async def test_actual_time_of_a_step_runs_from_the_wake_up_before_it_to_its_own():
    lateness_ps = OVERHEAD_PS // 2
    bench = Bench(oversleep_ps=lambda _sleep: lateness_ps)
    await bench.run(5)
    # Every step is noticed equally late, so the lateness counts once, in the first.
    assert bench.metric("step_actual_seconds_sum") == pytest.approx((sum(bench.durations()) + lateness_ps) / 1e12)


async def test_actual_time_of_a_step_after_a_gap_runs_from_its_start():
    stall_ps = 100 * OVERHEAD_PS
    bench = Bench(oversleep_ps=lambda sleep: stall_ps if sleep == 2 else 0)
    await bench.run(6)
    # The stall belongs to the step that was noticed late, not to the one that waited for it.
    assert bench.metric("step_actual_seconds_sum") == pytest.approx((sum(bench.durations()) + stall_ps) / 1e12)


async def test_second_plan_before_the_hand_back_is_refused():
    bench = Bench()
    bench.pacer.start(Plan(1, 0, 1))
    with pytest.raises(ValueError, match="plan 2 came while plan 1 runs"):
        bench.pacer.start(Plan(2, 0, 1))


async def test_plan_of_no_steps_that_brings_work_is_refused():
    with pytest.raises(ValueError, match="plan 1 has work and no step for it"):
        Bench().pacer.start(Plan(1, 0, 0, prefills=(PrefillWork(1, 1, 0, samples=True),)))
