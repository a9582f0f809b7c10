"""When an input takes effect: at the first boundary at or after its stamp, or late."""

from lorrery.scheduler.core.inbox import Recall
from lorrery.scheduler.facts import InputLate
from lorrery.scheduler.steps import Inputs


def expect(inputs: Inputs, handle: int, at_ps: int) -> None:
    inputs.take(Recall(handle, ""), at_ps, expected=True, lost=False)


def numbers(events: list[InputLate]) -> list[int]:
    return [event.number for event in events]


def test_an_event_is_on_time_at_the_first_boundary_at_or_after_its_stamp() -> None:
    inputs = Inputs()
    inputs.planned(0)
    expect(inputs, 7, 15)
    inputs.stepped(10)
    inputs.stepped(20)
    assert not inputs.any_overdue
    assert inputs.planned(20) == []
    assert inputs.awaited == []


def test_an_event_at_a_boundary_takes_effect_there() -> None:
    inputs = Inputs()
    expect(inputs, 7, 20)
    inputs.stepped(20)
    assert inputs.planned(20) == []


def test_a_step_beyond_the_boundary_makes_an_event_late() -> None:
    inputs = Inputs()
    expect(inputs, 7, 15)
    expect(inputs, 8, 25)
    inputs.stepped(20)
    inputs.stepped(30)
    assert inputs.any_overdue
    assert numbers(inputs.planned(30)) == [0]
    assert not inputs.any_overdue


def test_a_plan_before_an_events_stamp_leaves_it_waiting() -> None:
    inputs = Inputs()
    expect(inputs, 7, 15)
    inputs.stepped(10)
    assert inputs.planned(10) == []
    inputs.stepped(20)
    assert inputs.planned(20) == []


def test_an_event_that_comes_after_the_plan_that_should_have_seen_it_has_missed_it() -> None:
    inputs = Inputs()
    inputs.stepped(20)
    inputs.planned(20)
    inputs.planned(20)
    assert inputs.missed(20)
    assert not inputs.missed(21)
    expect(inputs, 7, 19)
    (late,) = inputs.planned(20)
    assert late.missed == 2


def test_plans_missed_count_only_where_the_event_takes_effect() -> None:
    inputs = Inputs()
    inputs.stepped(20)
    inputs.planned(20)
    expect(inputs, 7, 19)
    inputs.stepped(30)
    (late,) = inputs.planned(30)
    assert late.missed == 0


def test_of_what_is_withdrawn_only_the_overdue_is_told() -> None:
    inputs = Inputs()
    expect(inputs, 7, 15)
    inputs.stepped(20)
    inputs.stepped(30)
    expect(inputs, 8, 35)
    expect(inputs, 9, 35)
    assert numbers(inputs.left({7, 8})) == [0]
    assert [one.number for one in inputs.awaited] == [2]
