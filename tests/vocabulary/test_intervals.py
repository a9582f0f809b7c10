"""Means over seeds, and their intervals."""

import math

import numpy as np
import pytest

from lorrery.vocabulary.intervals import is_clear, mean_and_margin, student


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (8, 2.306), (12, 2.179), (24, 2.064)],
)
def test_students_quantiles_are_those_of_the_tables(degrees: float, expected: float) -> None:
    assert student(0.95, degrees) == pytest.approx(expected, rel=0.01)


def test_the_interval_holds_the_mean_in_nineteen_of_twenty_cases() -> None:
    rng = np.random.default_rng(1)
    for num_seeds in (2, 3, 5, 20):
        found = [mean_and_margin(row) for row in rng.normal(10.0, 2.0, (4_000, num_seeds)).tolist()]
        assert sum(abs(mean - 10.0) <= margin for mean, margin in found) / 4_000 == pytest.approx(0.95, abs=0.012)


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    assert mean_and_margin([3.0, math.nan]) == (3.0, math.inf)
    assert all(map(math.isnan, mean_and_margin([])))
    assert not is_clear([3.0])


def test_a_difference_is_clear_if_its_interval_leaves_out_0() -> None:
    assert is_clear([1.0, 1.2, 0.9])
    assert not is_clear([1.0, -1.2, 0.9])
    assert not is_clear([0.0, 0.0, 0.0])
