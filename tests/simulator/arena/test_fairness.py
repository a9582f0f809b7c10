"""How evenly tenants are served, on requests whose service is known."""

import pytest

from lorrery.simulator.arena.fairness import Served, jain_of_shares, service_gap


def served(arrived: int, admitted: int | None, end: int, prompt: int = 100, output: int = 0) -> Served:
    first = None if admitted is None else admitted
    return Served(arrived, admitted, first, end, prompt, output, 0 if admitted is None else output)


def test_equal_service_has_no_gap_and_an_index_of_one() -> None:
    tenants = {name: [served(at, at + 5, at + 10) for at in range(0, 1000, 10)] for name in "ab"}
    assert service_gap(tenants) == 0
    assert jain_of_shares(tenants) == pytest.approx(1.0, abs=1e-3)


def test_the_gap_is_of_times_in_which_both_wait() -> None:
    waits = [served(0, None, 1000)]
    a, b = [*waits, *(served(at, at, at) for at in range(0, 1000, 100))], waits
    assert service_gap({"a": a, "b": [*b, served(1000, 1000, 1000)]}) == 900  # b waits as a is given 100 nine times
    rested = [served(at, at, at) for at in range(0, 1001, 100)]
    assert service_gap({"a": a, "b": rested}) == 0  # b never waits
    assert service_gap({"a": a}) == 0


def test_output_counts_twice_and_as_it_comes() -> None:
    a = [served(0, 0, 1000, prompt=0, output=500), served(0, None, 1000)]
    assert service_gap({"a": a, "b": [served(0, None, 1000), served(1000, None, 1000)]}) == pytest.approx(
        1000, rel=0.01
    )


def test_a_tenant_that_asks_for_little_and_gets_it_is_not_treated_unfairly() -> None:
    light, heavy = [served(0, 0, 0, prompt=10)], [served(0, 0, 0, prompt=500), served(1, None, 9, prompt=500)]
    assert jain_of_shares({"light": light, "heavy": heavy}) == pytest.approx(1.0)
    crowded = [served(0, None, 9, prompt=400)]
    assert jain_of_shares({"light": crowded, "heavy": heavy}) == pytest.approx(0.5)


def test_nothing_served_is_even() -> None:
    assert jain_of_shares({"a": [served(0, None, 1)], "b": [served(0, None, 1)]}) == 1.0
