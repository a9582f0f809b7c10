"""When an event takes effect: at the first boundary at or after its stamp, or late."""

from lorrery.scheduler.effects import Awaited, Effects


def numbers(events: list[Awaited]) -> list[int]:
    return [event.number for event in events]


def test_an_event_is_on_time_at_the_first_boundary_at_or_after_its_stamp() -> None:
    effects = Effects()
    effects.planned(0)
    effects.expect(0, 7, 15)
    effects.stepped(10)
    effects.stepped(20)
    assert not effects.any_overdue
    assert effects.planned(20) == []
    assert effects.awaited == []


def test_an_event_at_a_boundary_takes_effect_there() -> None:
    effects = Effects()
    effects.expect(0, 7, 20)
    effects.stepped(20)
    assert effects.planned(20) == []


def test_a_step_beyond_the_boundary_makes_an_event_late() -> None:
    effects = Effects()
    effects.expect(0, 7, 15)
    effects.expect(1, 8, 25)
    effects.stepped(20)
    effects.stepped(30)
    assert effects.any_overdue
    assert numbers(effects.planned(30)) == [0]
    assert not effects.any_overdue


def test_a_plan_before_an_events_stamp_leaves_it_waiting() -> None:
    effects = Effects()
    effects.expect(0, 7, 15)
    effects.stepped(10)
    assert effects.planned(10) == []
    effects.stepped(20)
    assert effects.planned(20) == []


def test_an_event_that_comes_after_the_plan_that_should_have_seen_it_has_missed_it() -> None:
    effects = Effects()
    effects.stepped(20)
    effects.planned(20)
    effects.planned(20)
    assert effects.missed(20)
    assert not effects.missed(21)
    effects.expect(0, 7, 19)
    (late,) = effects.planned(20)
    assert late.missed == 2


def test_plans_missed_count_only_where_the_event_takes_effect() -> None:
    effects = Effects()
    effects.stepped(20)
    effects.planned(20)
    effects.expect(0, 7, 19)
    effects.stepped(30)
    (late,) = effects.planned(30)
    assert late.missed == 0


def test_of_what_is_withdrawn_only_the_overdue_is_told() -> None:
    effects = Effects()
    effects.expect(0, 7, 15)
    effects.stepped(20)
    effects.stepped(30)
    effects.expect(1, 8, 35)
    effects.expect(2, 9, 35)
    assert numbers(effects.withdrawn({7, 8})) == [0]
    assert numbers(effects.awaited) == [2]
