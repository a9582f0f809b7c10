"""Seconds become picoseconds as `round` makes them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.vocabulary.units import PS_PER_SECOND, picoseconds

HALVES = st.integers(-(2**52), 2**52).map(lambda halves: halves / 2 / PS_PER_SECOND)


@given(st.one_of(st.floats(-1e30, 1e30), HALVES, st.floats(-1e-9, 1e-9)))
def test_it_is_the_nearest_and_of_two_the_even_one(seconds: float) -> None:
    nearest = round(seconds * PS_PER_SECOND)
    assert picoseconds(seconds) == nearest
    assert picoseconds(np.float64(seconds)) == nearest


def test_halves_go_to_the_even_one() -> None:
    assert [picoseconds(n / 2 / PS_PER_SECOND) for n in (-5, -3, -1, 1, 3, 5)] == [-2, -2, 0, 0, 2, 2]


def test_what_has_no_nearest_is_refused() -> None:
    with pytest.raises(OverflowError):
        picoseconds(math.inf)
    with pytest.raises(ValueError, match="NaN"):
        picoseconds(math.nan)
