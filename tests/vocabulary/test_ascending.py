"""Whole numbers in order: what is called there does what the standard library's `bisect` does."""

import bisect

from hypothesis import given
from hypothesis import strategies as st

from lorrery.vocabulary import ascending

values = st.integers(-(2**62), 2**62) | st.integers(-3, 3)


@given(st.lists(values), values)
def test_the_places_are_those_of_the_standard_library(numbers: list[int], value: int) -> None:
    numbers.sort()
    assert ascending.bisect_left(numbers, value) == bisect.bisect_left(numbers, value)
    with_one_more, expected = numbers.copy(), numbers.copy()
    ascending.insort(with_one_more, value)
    bisect.insort(expected, value)
    assert with_one_more == expected
