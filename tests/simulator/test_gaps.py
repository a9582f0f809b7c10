"""Gaps between tokens, kept by spans of steps, add up to what each request says."""

import pytest

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.whole_prompts import LlmMock
from lorrery.scheduler.core.cluster_facts import GaveBack
from lorrery.scheduler.core.facts import Facts
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.memory.base import UnlimitedMemory
from lorrery.scheduler.core.plan import Chunk, Plan
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Sequence
from lorrery.simulator.loop.outcomes import GapRecorder, OutcomeRecorder
from lorrery.simulator.loop.worker import StepSpan
from lorrery.vocabulary.units import NEVER
from tests.simulator.fuzz import gaps_of, simulate
from tests.simulator.fuzz_cases import draw_case


def test_they_add_up_to_the_time_from_first_to_last_token() -> None:
    num_checked = num_requeued = 0
    for number in range(450):
        case = draw_case(number)
        ended, gaps = simulate(case)
        if any(request.outcome != "finished" for request in ended):
            continue
        itl_ms = gaps.itl_ms()
        assert itl_ms.count == sum(request.output_tokens - 1 for request in ended), case.title
        outcomes = OutcomeRecorder()
        for request in ended:
            outcomes.add(request)
        table = outcomes.table(itl_ms)
        spans = table.last_token_seconds - table.first_token_seconds
        assert itl_ms.mean * itl_ms.count / 1e3 == pytest.approx(float(spans.sum()), rel=1e-9), case.title
        num_checked += 1
        num_requeued += any(request.num_requeues for request in ended)
    assert num_checked > 100
    assert num_requeued > 5


def span(
    start_ps: int,
    end_ps: int,
    num_decodes: int,
    newcomers: tuple[int, ...] = (),
    num_steps: int = 1,
    *,
    silent: tuple[int, ...] = (),
    gone: tuple[int, ...] = (),
    prefilled: tuple[int, ...] = (),
    worker: str = "w",
) -> StepSpan:
    first_ps = (end_ps - start_ps) // num_steps
    plan = Plan(start_ps, num_steps, [Chunk(Sequence(handle, 10, 5), 10, 0, True) for handle in prefilled])
    return StepSpan(
        worker, plan, start_ps, num_steps, first_ps, 0, end_ps, num_decodes, 0, 0, newcomers, silent=silent, gone=gone
    )


def member(name: str) -> Member:
    return Member(name, Replica(Fifo(), LlmMock(BatchLimits(1, NEVER)), UnlimitedMemory()))


def tell(gaps: GapRecorder, fact: object) -> None:
    Facts([gaps]).publish([fact], 0)


def requeue(gaps: GapRecorder, worker: str, sequence: Sequence, produced_tokens: int) -> None:
    sequence.requeue(produced_tokens, 0)
    tell(gaps, GaveBack(member(worker), True, [sequence], []))


def in_order(gaps: GapRecorder) -> list[int]:
    return sorted(gap_ps for gap_ps, count in gaps_of(gaps).items() for _ in range(count))


def test_a_newcomers_first_gap_goes_back_to_its_own_prefill() -> None:
    gaps = GapRecorder()
    tell(gaps, span(0, 10, 0, (1,)))
    tell(gaps, span(10, 30, 1, num_steps=2))
    tell(gaps, span(30, 70, 0, (2,)))
    tell(gaps, span(70, 75, 2))
    assert in_order(gaps) == [5, 10, 10, 45]


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("why", ["silent", "gone"])
def test_a_step_that_gives_a_sequence_no_token_is_no_gap_of_it(why: str, num_steps: int) -> None:
    gaps = GapRecorder()
    tell(gaps, span(0, 10, 0, (1, 2)))
    tell(gaps, span(10, 17, 2))
    tell(gaps, span(17, 17 + 4 * num_steps, 2, num_steps=num_steps, **{why: (1,)}))
    assert in_order(gaps) == [4] * (2 * num_steps - 1) + [7, 7]


def test_a_newcomer_whose_first_step_gives_no_token_has_no_gap() -> None:
    """It was queued again with all but its last token."""
    gaps = GapRecorder()
    tell(gaps, span(0, 10, 0, (1,)))
    tell(gaps, span(10, 20, 1))
    tell(gaps, span(20, 30, 0, (2,)))
    tell(gaps, span(30, 35, 2, silent=(2,)))
    assert in_order(gaps) == [10, 15]


def test_a_prefill_that_gives_no_token_takes_no_gap_from_those_who_decode() -> None:
    """Who had all tokens was queued again for the step after the last."""
    gaps = GapRecorder()
    tell(gaps, span(0, 10, 0, (1,)))
    tell(gaps, span(10, 20, 1))
    tell(gaps, span(20, 27, 1, prefilled=(2,), silent=(2,)))
    assert in_order(gaps) == [7, 10]


def test_a_gap_goes_back_to_the_last_token_over_two_losses_without_one_between() -> None:
    gaps = GapRecorder()
    sequence = Sequence(1, 10, 5)
    tell(gaps, span(0, 10, 0, (1,), worker="first"))
    tell(gaps, span(10, 30, 1, worker="first"))
    requeue(gaps, "first", sequence, 2)
    tell(gaps, span(30, 40, 0, (2,), worker="second"))
    tell(gaps, span(40, 50, 1, worker="second"))
    requeue(gaps, "second", sequence, 0)
    tell(gaps, span(90, 100, 0, (1,), prefilled=(1,), worker="third"))
    assert in_order(gaps) == [10, 20, 70]


def test_a_sequence_that_is_lost_after_its_prefill_goes_back_to_the_token_of_that() -> None:
    gaps = GapRecorder()
    lost = Sequence(1, 10, 5), Sequence(2, 10, 5)
    tell(gaps, span(0, 10, 0, (1,)))
    tell(gaps, span(10, 30, 1))
    tell(gaps, span(30, 40, 0, (2,)))
    for sequence, produced_tokens in zip(lost, (2, 1), strict=True):
        sequence.requeue(produced_tokens, 0)
    tell(gaps, GaveBack(member("w"), True, [*lost], []))
    tell(gaps, span(90, 100, 0, (1, 2), prefilled=(1, 2), worker="second"))
    assert in_order(gaps) == [20, 60, 70]


@pytest.mark.parametrize(("gone", "expected"), [((), [10, 30]), ((1,), [10])])
def test_a_requeued_sequence_that_its_prefill_finishes_has_a_gap_if_its_client_waits(gone, expected) -> None:
    gaps = GapRecorder()
    sequence = Sequence(1, 10, 3)
    tell(gaps, span(0, 10, 0, (1,), prefilled=(1,)))
    tell(gaps, span(10, 20, 1))
    requeue(gaps, "w", sequence, 2)
    tell(gaps, span(30, 50, 0, prefilled=(1,), gone=gone))
    assert in_order(gaps) == expected
