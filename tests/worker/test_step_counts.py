"""Steps are counted many at a time, each once, whatever ends the counting."""

import asyncio
from fractions import Fraction

import numpy as np
import pytest

from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.metrics import new_registry
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import Batch, PrefillWork, StepOutcome
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.output import Ending
from lorrery.worker.device.roofline import Roofline
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.device.steptime import NO_SPELLS, Spells
from lorrery.worker.engine_metrics import Engine
from lorrery.worker.metrics import COUNT_AFTER, StepAccounts, StepRecord, WorkerMetrics
from lorrery.worker.pacer import StepReport
from tests.worker.device.known import deployment
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


@pytest.mark.parametrize(
    ("boundary_ps", "gap_ps", "is_slow"),
    [(999, 0, False), (999, 1, False), (1000, 0, True), (1999, 0, True), (1999, 500, True), (2000, 0, False)],
)
def test_a_step_is_slow_by_the_boundary_before_it_however_late_it_began(boundary_ps: int, gap_ps: int, is_slow: bool):
    registry = new_registry("worker")
    gpu = MockGpu(Roofline(deployment("H100", "Llama-3-8B")))
    accounts = StepAccounts(gpu, WorkerMetrics(registry, "w", 10_000), Spells([(1000, 2000, Fraction(3))]))
    batch = Batch((), 1, 100, 100)
    modelled_ps, start_ps = gpu.step_cost(batch).total_ps, boundary_ps + gap_ps
    outcome = StepOutcome(np.array([1], np.uint32), np.array([7], np.uint32), ())
    end_ps = start_ps + modelled_ps * (3 if is_slow else 1)
    accounts.ended(StepRecord(batch, (), outcome, gap_ps, start_ps, end_ps, 0, 0.0), last=True)
    accounts.count()
    found = [
        registry.get_sample_value(f"lorrery_worker_{name}", {"worker": "w", "kind": kind})
        for name, kind in (("faults_total", "slow_worker"), ("step_part_seconds_total", "whole"))
    ]
    assert found == [is_slow, pytest.approx(2 * modelled_ps / PS_PER_SECOND if is_slow else 0.0)]


def _shown(*, count_after_each: bool) -> dict[str, float]:
    """Return what is shown of two prompts and 39 decodes, some after a gap, counted one by one or at the end."""
    registry = new_registry("worker")
    engine = Engine.of(Settings.model_validate({"model": "Llama-3-8B"}), registry, 10_000)
    gpu = MockGpu(Roofline(deployment("H100", "Llama-3-8B")))
    accounts = StepAccounts(gpu, WorkerMetrics(registry, "worker", 10_000, engine=engine), NO_SPELLS)
    for handle, length in ((1, 30), (2, 40)):
        gpu.join(DeviceSequence(handle, 100, 0, 5, Ending(length, FinishReason.LENGTH), None, "a", 16))
    prefills = (PrefillWork(1, 100, 0, samples=True), PrefillWork(2, 100, 0, samples=True))
    number = end_ps = 0
    gpu.begin(prefills, decode=True)
    while len(gpu):
        batch, duration_ps, gap_ps = gpu.batch(), gpu.step_ps(), 10**9 if number % 7 == 3 else 0
        start_ps = end_ps + gap_ps
        end_ps = start_ps + duration_ps
        number += 1
        accounts.ended(
            StepRecord(batch, prefills, gpu.advance(), gap_ps, start_ps, end_ps, duration_ps + 5, number / 1e5),
            last=False,
        )
        if count_after_each:
            accounts.count()
    accounts.count()
    ours = ("lorrery_worker", "vllm", "sglang")
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith(ours)
    }


def test_steps_counted_together_show_what_each_counted_alone_does():
    alone = _shown(count_after_each=True)
    assert alone["lorrery_worker_steps_total{'kind': 'decode', 'worker': 'worker'}"] == 39
    assert alone["lorrery_worker_gaps_total{'worker': 'worker'}"] == 6
    assert _shown(count_after_each=False) == pytest.approx(alone)
