"""Gaps between tokens, kept by stretches of steps, add up to what each request says."""

import pytest

from lorrery.scheduler.core.plan import Plan
from lorrery.simulator.gaps import GapRecorder
from lorrery.simulator.outcomes import OutcomeRecorder
from lorrery.simulator.stretch import Stretch
from tests.simulator.fuzz import draw_case, simulate


def test_they_add_up_to_the_time_from_first_to_last_token() -> None:
    num_checked = num_requeued = 0
    for number in range(300):
        case = draw_case(number)
        ended, gaps = simulate(case)
        if any(request.outcome != "finished" for request in ended):
            continue
        pooled = gaps.gaps()
        assert int(pooled.counts.sum()) == sum(request.output_tokens - 1 for request in ended), case.title
        outcomes = OutcomeRecorder()
        for request in ended:
            outcomes.add(request)
        table = outcomes.table(pooled)
        spans = table.last_token_seconds - table.first_token_seconds
        assert float(pooled.seconds @ pooled.counts) == pytest.approx(float(spans.sum()), rel=1e-9), case.title
        num_checked += 1
        num_requeued += any(request.num_requeues for request in ended)
    assert num_checked > 100
    assert num_requeued > 5


def test_a_newcomers_first_gap_goes_back_to_its_own_prefill() -> None:
    gaps = GapRecorder()
    plan = Plan(0, 1)

    def stretch(start_ps: int, end_ps: int, num_decodes: int, newcomers: list[int], num_steps: int = 1) -> Stretch:
        first_ps = (end_ps - start_ps) // num_steps
        return Stretch("w", plan, start_ps, num_steps, first_ps, 0, end_ps, num_decodes, 0, 0, newcomers)

    gaps.ran(stretch(0, 10, 0, [1]))
    gaps.ran(stretch(10, 30, 1, [], 2))
    gaps.ran(stretch(30, 70, 0, [2]))
    gaps.ran(stretch(70, 75, 2, []))
    pooled = gaps.gaps()
    found = sorted(zip((pooled.seconds * 1e12).round().tolist(), pooled.counts.tolist(), strict=True))
    assert found == [(5, 1), (10, 1), (10, 1), (45, 1)]
