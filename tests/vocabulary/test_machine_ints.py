"""What is called there does what the standard library does."""

import bisect

from hypothesis import given
from hypothesis import strategies as st

from lorrery.vocabulary import machine_ints

values = st.integers(-(2**62), 2**62) | st.integers(-3, 3)


@given(st.lists(values), values)
def test_the_places_are_those_of_the_standard_library(numbers: list[int], value: int) -> None:
    numbers.sort()
    assert machine_ints.bisect_left(numbers, value) == bisect.bisect_left(numbers, value)
    with_one_more, expected = numbers.copy(), numbers.copy()
    machine_ints.insort(with_one_more, value)
    bisect.insort(expected, value)
    assert with_one_more == expected


@given(st.lists(st.integers(0, 2**31), max_size=20), st.integers(0, 25))
def test_the_sums_of_the_first_and_of_the_last_are_those_of_slices(numbers: list[int], num: int) -> None:
    num = min(num, len(numbers))
    assert machine_ints.sum_of_first(numbers, num) == sum(numbers[:num])
    assert machine_ints.sum_of_last(numbers, num) == sum(numbers[len(numbers) - num :])


@given(*[st.integers() | st.integers(0, 2**16 + 1) | st.integers(2**45, 2**47)] * 2)
def test_a_product_is_exact_however_large(one: int, other: int) -> None:
    assert machine_ints.product(one, other) == one * other
