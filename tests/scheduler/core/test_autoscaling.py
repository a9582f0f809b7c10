"""The rule against what Kubernetes documents of the HorizontalPodAutoscaler, and KEDA of its way to zero."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.autoscaling import MOST_REPLICAS, Autoscaler, Direction, Reading, Rule

FREE = Direction(stabilization_seconds=0, max_pods=10_000, max_percent=0, period_seconds=15)
HPA_UP = Direction(stabilization_seconds=0, max_pods=4, max_percent=100, period_seconds=15)
HPA_DOWN = Direction(stabilization_seconds=300, max_pods=0, max_percent=100, period_seconds=15)


def rule(
    target: float = 100.0,
    *,
    fewest: int = 1,
    most: int = 1000,
    tolerance: float = 0.1,
    up: Direction = FREE,
    down: Direction = FREE,
    cooldown: float = 300.0,
) -> Rule:
    return Rule({"m": target}, fewest, most, tolerance, up, down, cooldown)


def total(value: float) -> dict[str, Reading]:
    return {"m": Reading(value, is_total=True)}


def of_cluster(value: float) -> dict[str, Reading]:
    return {"m": Reading(value, is_total=False)}


@pytest.mark.parametrize(
    ("average", "current", "wanted"),
    [
        (200, 3, 6),  # "if the current metric value is 200m, and the desired value is 100m, the number is doubled"
        (50, 4, 2),  # "if the current value is 50m, the number of replicas will be halved"
        (50, 3, 2),  # 1.5, rounded up
        (109, 5, 5),  # within the tolerance of 0.1
        (91, 5, 5),
        (112, 5, 6),
        (0, 5, 1),
    ],
)
def test_desired_is_current_times_value_over_target_rounded_up(average: float, current: int, wanted: int):
    assert Autoscaler(rule()).decide(0, current, current, total(average * current)).replicas == wanted
    assert Autoscaler(rule()).decide(0, current, current, of_cluster(average)).replicas == wanted


def test_several_metrics_want_and_the_largest_wins():
    two = Rule({"a": 10.0, "b": 1.0}, 1, 100, 0.1, FREE, FREE, 300)
    readings = {"a": Reading(15.0, is_total=False), "b": Reading(3.0, is_total=False)}
    decision = Autoscaler(two).decide(0, 2, 2, readings)
    assert (decision.replicas, decision.why) == (6, "b is 3, target 1")


def test_where_a_metric_has_no_value_the_others_scale_up_and_not_down():
    two = Rule({"a": 10.0, "b": 1.0}, 0, 100, 0.1, FREE, FREE, cooldown_seconds=60)
    autoscaler = Autoscaler(two)
    assert autoscaler.decide(0, 4, 4, {"a": Reading(20.0, is_total=False)}).replicas == 8
    kept = autoscaler.decide(60, 8, 8, {"a": Reading(0.0, is_total=False)})
    assert (kept.replicas, kept.recommended) == (8, 0)
    assert kept.why == "b has no value, and the others want fewer"
    both = {"a": Reading(0.0, is_total=False), "b": Reading(0.0, is_total=False)}
    assert autoscaler.decide(75, 8, 8, both).replicas == 0


def test_starting_replicas_count_as_idle_for_more_and_as_just_right_for_fewer():
    assert Autoscaler(rule()).decide(0, 4, 2, total(1000)).replicas == 10  # 1000 over four is 2.5 times the target
    assert Autoscaler(rule()).decide(0, 4, 2, total(300)).replicas == 4  # over two 1.5 times, over four less than it
    assert Autoscaler(rule()).decide(0, 4, 2, total(50)).replicas == 3  # 50 of two, and 100 each of the others


def test_the_documented_policies_take_80_replicas_down_to_10():
    down = Direction(stabilization_seconds=0, max_pods=4, max_percent=10, period_seconds=60)
    autoscaler, replicas, seen = Autoscaler(rule(fewest=10, down=down)), 80, []
    for minute in range(20):
        replicas = autoscaler.decide(60 * minute, replicas, replicas, total(1)).replicas
        seen.append(replicas)
    assert seen[:3] == [72, 64, 57]  # "10% of the pods is 7.2, but the number is rounded up to 8"
    below_40 = [one for one in seen if one < 40]
    assert [one - after for one, after in pairwise(below_40)][:6] == [4, 4, 4, 4, 4, 4]
    assert seen[-1] == 10


@pytest.mark.parametrize("is_up", [True, False])
@pytest.mark.parametrize(
    ("own_seconds", "other_seconds", "steps"), [(60, 15, [2, 2, 4]), (15, 60, [2, 4, 6]), (15, 15, [2, 4, 6])]
)
def test_each_direction_counts_the_changes_of_its_own_period(
    is_up: bool, own_seconds: float, other_seconds: float, steps: list[int]
):
    own, other = (Direction(0, max_pods=2, max_percent=0, period_seconds=one) for one in (own_seconds, other_seconds))
    up, down, value, sign = (own, other, 10_000.0, 1) if is_up else (other, own, 1.0, -1)
    autoscaler, current, seen = Autoscaler(rule(up=up, down=down)), 10, []
    for at in (0, 30, 60):  # a change of just one period ago is over
        current = autoscaler.decide(at, current, current, total(value)).replicas
        seen.append(current)
    assert seen == [10 + sign * step for step in steps]


def test_the_default_behaviour_doubles_or_adds_four_and_remembers_five_minutes():
    autoscaler = Autoscaler(rule(up=HPA_UP, down=HPA_DOWN))
    assert autoscaler.decide(0, 1, 1, total(10_000)).replicas == 5
    assert autoscaler.decide(5, 5, 1, total(10_000)).replicas == 5  # four have come within the period
    assert autoscaler.decide(15, 5, 5, total(10_000)).replicas == 10
    assert autoscaler.decide(30, 10, 10, total(800)).replicas == 10
    assert autoscaler.decide(314, 10, 10, total(100)).replicas == 10
    assert autoscaler.decide(315, 10, 10, total(100)).replicas == 8  # the largest of five minutes is now 8
    assert autoscaler.decide(331, 8, 8, total(100)).replicas == 1


def test_a_window_for_scaling_up_takes_the_smallest_answer():
    up = Direction(stabilization_seconds=60, max_pods=100, max_percent=0, period_seconds=15)
    autoscaler = Autoscaler(rule(up=up))
    assert [autoscaler.decide(at, 2, 2, total(600)).replicas for at in (0, 15, 30, 45)] == [2, 2, 2, 2]
    assert autoscaler.decide(60, 2, 2, total(900)).replicas == 6


def test_with_no_policy_nothing_moves_in_a_direction():
    fixed = Direction(stabilization_seconds=0, max_pods=0, max_percent=0, period_seconds=15)
    assert Autoscaler(rule(down=fixed)).decide(0, 5, 5, total(0)).replicas == 5
    assert Autoscaler(rule(up=fixed)).decide(0, 5, 5, total(5000)).replicas == 5


def test_zero_replicas_come_after_the_cooldown_and_end_with_the_first_request():
    autoscaler = Autoscaler(rule(fewest=0, cooldown=60))
    assert autoscaler.decide(0, 1, 1, total(5)).replicas == 1
    assert autoscaler.decide(59, 1, 1, total(0)).replicas == 1
    assert autoscaler.decide(60, 1, 1, total(0)).replicas == 0
    assert autoscaler.decide(75, 0, 0, total(0)).replicas == 0
    assert autoscaler.decide(90, 0, 0, total(1)).replicas == 1


def test_where_no_replica_says_anything_nothing_changes_but_for_what_waits_for_any():
    # replica_calculator.go: "did not receive metrics for targeted pods (pods might be unready)", and an error holds
    silent = {"m": Reading(0.0, is_total=True, replicas=0)}
    decision = Autoscaler(rule()).decide(0, 4, 0, silent)
    assert (decision.replicas, decision.recommended, decision.why) == (4, 4, "no metric has a value")
    seen_before = {"m": Reading(400.0, is_total=True, replicas=4)}  # of those that have gone since
    assert Autoscaler(rule()).decide(0, 4, 0, seen_before).replicas == 4
    for waiting, wanted in ((50.0, 4), (420.0, 4), (1000.0, 10)):
        assert Autoscaler(rule()).decide(0, 4, 0, {"m": Reading(waiting, True, replicas=0)}).replicas == wanted


def test_the_way_to_zero_does_not_wait_for_a_start():
    autoscaler = Autoscaler(rule(fewest=0, cooldown=60))
    silent = {"m": Reading(0.0, is_total=True, replicas=0)}
    assert [autoscaler.decide(at, 1, 0, silent).replicas for at in (0, 30, 60)] == [1, 1, 0]
    assert autoscaler.decide(75, 0, 0, silent).replicas == 0
    assert autoscaler.decide(90, 0, 0, {"m": Reading(3.0, is_total=True, replicas=0)}).replicas == 1


@pytest.mark.parametrize("is_total", [True, False])
def test_a_value_beyond_all_measure_wants_the_most_there_may_be(is_total: bool):
    decision = Autoscaler(rule(1e-300)).decide(0, 3, 2, {"m": Reading(1e308, is_total=is_total)})
    assert (decision.replicas, decision.recommended) == (1000, MOST_REPLICAS)


def test_without_a_value_the_number_stays():
    assert Autoscaler(rule()).decide(0, 3, 3, {}).replicas == 3


@given(
    bounds=st.tuples(st.integers(0, 5), st.integers(1, 20)).filter(lambda pair: pair[0] <= pair[1]),
    up=st.builds(Direction, st.sampled_from([0, 20, 60]), st.integers(0, 5), st.integers(0, 200), st.just(30)),
    down=st.builds(Direction, st.sampled_from([0, 20, 300]), st.integers(0, 5), st.integers(0, 100), st.just(60)),
    looks=st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1e4), st.floats(0, 1)), min_size=1, max_size=30),
    is_total=st.booleans(),
)
def test_replicas_stay_within_bounds_and_policies_whatever_is_seen(bounds, up, down, looks, is_total):
    fewest, most = bounds
    autoscaler = Autoscaler(rule(fewest=fewest, most=most, up=up, down=down, cooldown=40))
    replicas, at, came = max(fewest, 1), 0, []
    for wait, value, share in looks:
        at += wait
        before = replicas
        readings = {"m": Reading(value, is_total=is_total)}
        replicas = autoscaler.decide(at, before, round(before * share), readings).replicas
        assert fewest <= replicas <= most
        came.append((at, replicas - before))
        gained = sum(change for when, change in came if when > at - up.period_seconds)
        start = replicas - gained
        if replicas > before > 0:
            assert gained <= max(up.max_pods, -(-start * up.max_percent // 100))
        assert before == 0 or replicas > 0 or value == 0
