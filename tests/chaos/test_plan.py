"""The plan of a chaos run: a seed gives one plan, and the plan leaves no service alone."""

from collections import Counter

from tests.chaos.cluster import EXTRAS, ROUTERS, SERVICES
from tests.chaos.plan import START_SECONDS, Kind, draw_plan


def test_same_seed_gives_the_same_plan_and_another_gives_another():
    assert draw_plan(7, 300, SERVICES, ROUTERS) == draw_plan(7, 300, SERVICES, ROUTERS)
    assert draw_plan(7, 300, SERVICES, ROUTERS) != draw_plan(8, 300, SERVICES, ROUTERS)


def test_every_service_is_killed_stopped_and_told_to_end():
    plans = [draw_plan(seed, 300, SERVICES, ROUTERS) for seed in (1, 2, 3)]
    done = Counter((action.kind, action.target) for plan in plans for action in plan)
    for service in SERVICES:
        for kind in (Kind.KILL, Kind.STOP, Kind.TERMINATE):
            assert done[kind, service] > 0, (kind, service)
    assert all(done[kind, router] for kind in (Kind.LOAD, Kind.UNLOAD) for router in ROUTERS)


def test_actions_come_in_order_and_leave_a_service_time_to_start():
    plan = draw_plan(2, 300, SERVICES, ROUTERS)
    assert [action.at_seconds for action in plan] == sorted(action.at_seconds for action in plan)
    free_from = dict.fromkeys(SERVICES, 0.0)
    for action in plan:
        if action.kind not in (Kind.LOAD, Kind.UNLOAD):
            assert action.at_seconds >= free_from[action.target]
            free_from[action.target] = action.at_seconds + action.seconds + START_SECONDS


def test_what_is_added_is_removed_and_in_the_end_there_is_nothing_more():
    for seed in range(20):
        there: set[str] = set()
        plan = draw_plan(seed, 60, SERVICES, ROUTERS, EXTRAS)
        scaled = [action for action in plan if action.kind in (Kind.ADD, Kind.REMOVE)]
        for action in scaled:
            assert (action.target in there) == (action.kind is Kind.REMOVE)
            (there.remove if action.kind is Kind.REMOVE else there.add)(action.target)
        assert not there
        assert {action.target for action in scaled} == set(EXTRAS)
        others = [action for action in plan if action not in scaled]
        assert others == draw_plan(seed, 60, SERVICES, ROUTERS)
