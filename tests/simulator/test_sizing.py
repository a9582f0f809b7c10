"""The search for the fewest replicas: it finds them, tries the number below, and tries few."""

from typing import Any

import pytest

from lorrery.loadgen.options import LoadOptions
from lorrery.service.settings.cluster import Settings, changed
from lorrery.simulator.plan.sizing import Trial, busy_rate, fewest, search, try_replicas

CLUSTER: dict[str, Any] = {"model": "Llama-2-7B", "worker": {"gpu": "A10G"}, "scheduler": {"policy": "fcfs"}}


def tries(enough: int, first: int, least: int = 1, most: int = 100) -> list[Trial]:
    return search(lambda n: Trial(n, 0.1, 0.01, 0, n >= enough), first, least, most)


@pytest.mark.parametrize("enough", range(1, 41))
@pytest.mark.parametrize("first", [1, 2, 7, 20, 40])
def test_the_smallest_number_is_found_and_the_one_below_it_was_tried(enough: int, first: int) -> None:
    trials = tries(enough, first, most=40)
    assert fewest(trials) == enough
    tried = [trial.num_replicas for trial in trials]
    assert len(set(tried)) == len(tried)
    assert enough == 1 or enough - 1 in tried
    assert len(tried) <= 12


def test_a_good_guess_takes_two_trials() -> None:
    assert [trial.num_replicas for trial in tries(7, 7)] == [7, 6]
    assert [trial.num_replicas for trial in tries(8, 7)] == [7, 8]


def test_a_guess_of_many_that_is_far_off_takes_a_dozen_trials() -> None:
    trials = tries(24, 108, most=432)
    assert [trial.num_replicas for trial in trials[:4]] == [108, 102, 90, 66]
    assert fewest(trials) == 24
    assert len(trials) <= 12
    assert len(tries(900, 256, most=1024)) <= 16


def test_nothing_below_the_least_is_tried() -> None:
    assert [trial.num_replicas for trial in tries(1, 6, least=3)] == [6, 5, 3]
    assert [trial.num_replicas for trial in tries(1, 3, least=3)] == [3]


def test_a_level_that_nothing_meets_ends_at_the_most() -> None:
    trials = tries(1000, 5, most=30)
    assert fewest(trials) is None
    assert [trial.num_replicas for trial in trials] == [5, 6, 8, 12, 20, 30]


@pytest.mark.parametrize(
    ("guess", "schedulers", "tried"),
    [
        (1, 1, [1, 2, 4, 8, 16, 17]),  # 16 more
        (1, 3, [3, 4, 6, 10, 18, 19]),  # each scheduler needs a worker
        (5, 1, [5, 6, 8, 12, 20, 21]),
        (6, 1, [6, 7, 9, 13, 21, 24]),  # four times as many
    ],
)
def test_a_level_that_nothing_meets_is_given_up_at_four_times_the_guess_or_16_more(
    guess: int, schedulers: int, tried: list[int]
) -> None:
    cluster = changed(CLUSTER, {"router.schedulers": [f"127.0.0.1:{port}" for port in range(1, 1 + schedulers)]})
    options = LoadOptions(rate=5, num_requests=2, input_range=(100, 100), output_range=(2, 2))
    watched: list[int] = []
    trials = try_replicas(cluster, options, ttft=0.0, tpot=None, guess=guess, watch=watched.append)
    assert watched == [trial.num_replicas for trial in trials] == tried
    assert fewest(trials) is None


def test_a_search_ends_where_every_request_fails_on_any_number_of_replicas() -> None:
    settings = changed(CLUSTER, {"scheduler.policy": "tests.simulator.faulty_queues:AnswersNone"})
    options = LoadOptions(rate=5, num_requests=20, input_range=(100, 100), output_range=(5, 5))
    (trial,) = try_replicas(settings, options, ttft=1.0, tpot=0.1, guess=1)
    assert (trial.ttft_p99, trial.tpot_p99, trial.num_failed, trial.met) == (None, None, 20, False)
    assert trial.failure.startswith("20 x INTERNAL, request 0: policy tests.simulator.faulty_queues:AnswersNone")
    assert "`admit` answered None" in trial.failure


def test_a_search_goes_on_where_deadlines_fail_every_request() -> None:
    options = LoadOptions(rate=5, num_requests=20, input_range=(100, 100), output_range=(50, 50), timeout=0.01)
    trials = try_replicas(changed(CLUSTER), options, ttft=1.0, tpot=0.1, guess=1)
    assert len(trials) > 1
    assert {trial.num_failed for trial in trials} == {20}
    assert {(trial.ttft_p99, trial.failure[:22], trial.in_vain) for trial in trials} == {
        (None, "20 x DEADLINE_EXCEEDED", False)
    }


def test_a_trial_says_how_most_of_its_failed_requests_failed() -> None:
    settings = changed(CLUSTER, {"scheduler.max_waiting_requests": 1, "scheduler.running_max_req_size": 1})
    options = LoadOptions(rate=100, num_requests=50, input_range=(100, 100), output_range=(50, 50))
    trial = try_replicas(settings, options, ttft=None, tpot=None, guess=1)[0]
    assert 0 < trial.num_failed < 50
    assert trial.ttft_p99
    assert trial.failure.startswith(f"{trial.num_failed} x RESOURCE_EXHAUSTED, request ")
    assert not trial.in_vain


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_waiting_requests": 4},
        {"max_waiting_requests_per_tenant": 4},
        {"deadline_admission": True, "start_within_seconds": 0.01},
        {"policy": "abort", "first_token_slo_seconds": 0.51},
    ],
    ids=lambda bounds: next(iter(bounds)),
)
def test_a_busy_replica_refuses_none_of_the_burst_that_its_run_begins_with(bounds: dict[str, Any]) -> None:
    own = {"policy": bounds.get("policy", "fcfs")}
    options = LoadOptions(input_range=(500, 500), output_range=(20, 20))
    cluster = Settings.model_validate({"model": "Llama-2-7B", "worker": {"gpu": "A10G"}, "scheduler": own})
    bounded = changed(cluster, {f"scheduler.{name}": value for name, value in bounds.items()})
    assert busy_rate(bounded, options, 24) == busy_rate(cluster, options, 24)


def test_the_rate_of_a_busy_replica_does_not_grow_with_the_schedulers() -> None:
    options = LoadOptions(input_range=(500, 500), output_range=(20, 20))
    two = changed(CLUSTER, {"router.schedulers": ["127.0.0.1:1", "127.0.0.1:2"]})
    rate, _ = busy_rate(changed(CLUSTER), options, 24)
    assert busy_rate(two, options, 24)[0] == pytest.approx(rate, rel=0.2)
