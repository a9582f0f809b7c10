"""Steps are counted many at a time, each once, whatever ends the counting."""

import asyncio
from fractions import Fraction

import pytest

from lorrery.worker.accounts import COUNT_AFTER
from lorrery.worker.device.slow import Spells
from lorrery.worker.pacer import StepReport
from tests.worker.test_pacer import START_PS, Bench, step_ps

pytestmark = pytest.mark.timing


def _counted(bench: Bench) -> tuple[float, float]:
    """Return the steps and tokens that are shown."""
    steps = sum(bench.metric("steps_total", kind=kind) or 0 for kind in ("prefill", "decode", "mixed", "empty"))
    return steps, bench.metric("output_tokens_total") or 0


async def test_steps_of_a_plan_that_is_cut_off_are_counted():
    def stop(bench: Bench, _report: StepReport) -> None:
        if len(bench.reports) == 3:
            bench.over.set()

    bench = Bench(on_report=stop)
    await bench.run(100)
    assert len(bench.reports) in range(3, 5)
    assert _counted(bench) == (len(bench.reports), len(bench.reports))


@pytest.mark.parametrize("num_steps", [COUNT_AFTER, COUNT_AFTER + 1, 2 * COUNT_AFTER + 3])
async def test_each_step_is_counted_once(num_steps: int):
    bench = Bench()
    await bench.run(num_steps)
    assert _counted(bench) == (num_steps, num_steps)


async def test_who_asks_is_shown_what_has_ended():
    shown: list[tuple[float, float]] = []

    def ask(bench: Bench, report: StepReport) -> None:
        if not report.hand_back:
            bench.pacer.count()  # the step that is being reported is not noted yet
            shown.append(_counted(bench))

    await Bench(on_report=ask).run(4)
    assert shown == [(0, 0), (1, 1), (2, 2)]


async def test_a_step_counts_by_the_spells_in_which_it_ran():
    def end_the_spell(bench: Bench, _report: StepReport) -> None:
        if len(bench.reports) == 3:
            asyncio.get_running_loop().call_soon(use_other_spells)

    def use_other_spells() -> None:
        bench.pacer.use(Spells([(START_PS, bench.pacer.boundary_ps + 1, Fraction(2))]))  # the step under way goes on so

    bench = Bench(on_report=end_the_spell, spells=Spells([(START_PS, START_PS + 10 * step_ps(9), Fraction(2))]))
    await bench.run(6)
    num_slow = sum(duration == 2 * step_ps(length) for length, duration in enumerate(bench.durations(), start=1))
    assert num_slow in {3, 4}
    assert bench.metric("faults_total", kind="slow_worker") == num_slow
