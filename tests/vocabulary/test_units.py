"""Seconds in picoseconds, and device times on 64 bits that wrap."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.vocabulary.units import FAR_PS, PS_PER_SECOND, from_wire, picoseconds, to_wire

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


LIMIT = 2**63
TIMES = st.one_of(
    st.integers(0, 2**70), st.integers(LIMIT - 10, LIMIT + 10), st.integers(2 * LIMIT - 10, 2 * LIMIT + 10)
)


@given(at_ps=TIMES, off_ps=st.integers(-FAR_PS, FAR_PS))
def test_a_time_is_what_its_reader_takes_it_for(at_ps: int, off_ps: int) -> None:
    wire_ps = to_wire(at_ps)
    assert -LIMIT <= wire_ps < LIMIT
    assert from_wire(wire_ps, at_ps + off_ps) == at_ps


@given(at_ps=st.integers(0, LIMIT - 1))
def test_before_the_first_wrap_a_time_is_itself(at_ps: int) -> None:
    assert to_wire(at_ps) == at_ps
