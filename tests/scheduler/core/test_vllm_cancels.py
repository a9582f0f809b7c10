"""Cancels under vLLM's rules, where those of a step free their blocks before its output counts."""

import pytest

from lorrery.scheduler.core.facts import Cancelled, Finished
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.endings import FinishReason
from tests.scheduler.core.test_vllm_step import STEP_PS, replica

both = pytest.mark.parametrize("ahead", [False, True], ids=["", "async"])


def begun(*handles: int, ahead: bool) -> tuple[Replica, Plan]:
    """Return a replica after the step with these prompts, and its next plan."""
    one = replica(async_scheduling=ahead)
    for handle in handles:
        one.submit(Sequence(handle, 8, 20), 0)
    first = one.plan(0)
    assert isinstance(first, Plan)
    one.commit(first, Ran(1, STEP_PS))
    second = one.plan(STEP_PS)
    assert isinstance(second, Plan)
    return one, second


@both
def test_a_cancel_that_comes_in_the_same_step_as_its_request_is_not_lost(ahead: bool) -> None:
    one, plan = begun(1, ahead=ahead)
    one.submit(Sequence(2, 8, 20), STEP_PS + 1)
    one.cancel(2, STEP_PS + 2)
    cancelled: list[int] = []
    for number in range(2, 6):
        one.commit(plan, Ran(1, number * STEP_PS))
        decision = one.plan(number * STEP_PS)
        assert isinstance(decision, Plan)
        cancelled += [event.sequence.handle for event in decision.events if isinstance(event, Cancelled)]
        plan = decision
    assert cancelled == [2]
    assert (one.num_running, one.num_waiting) == (1, 0)


def test_a_cancel_has_no_effect_while_the_device_runs_on() -> None:
    one, plan = begun(1, 2, ahead=False)
    one.cancel(1, STEP_PS + 1)
    one.commit(plan, Ran(1, 2 * STEP_PS), goes_on=True)  # its tokens of the next step are on their way
    assert one.num_running == 2
    one.commit(plan, Ran(1, 3 * STEP_PS))
    assert one.num_running == 1
    assert [type(event) for event in one.plan(3 * STEP_PS).events] == [Cancelled]


def test_a_cancel_that_took_effect_just_before_a_worker_is_lost_is_reported() -> None:
    one, plan = begun(1, 2, ahead=False)
    one.cancel(1, STEP_PS + 1)
    one.commit(plan, Ran(1, 2 * STEP_PS))
    unfinished, events = one.lose(3 * STEP_PS)
    assert [sequence.handle for sequence in unfinished] == [2]
    assert [(type(event), event.sequence.handle) for event in events if isinstance(event, Cancelled)] == [
        (Cancelled, 1)
    ]


def test_a_sequence_that_has_ended_is_named_until_its_place_is_free() -> None:
    one, plan = begun(1, 2, ahead=True)
    ended = one.commit(plan, Ran(1, 2 * STEP_PS, ((1, FinishReason.EOS),)))
    assert [event.sequence.handle for event in ended if isinstance(event, Finished)] == [1]
    assert list(one.ended) == [1]
    after = one.plan(2 * STEP_PS)
    assert isinstance(after, Plan)
    assert one.num_running == 2
    one.commit(after, Ran(1, 3 * STEP_PS))
    assert list(one.ended) == []
    assert one.num_running == 1
