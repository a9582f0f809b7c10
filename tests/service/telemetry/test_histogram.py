"""The histogram against one that counts each value at once, and while another thread reads."""

import threading
from bisect import bisect_left
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.service.telemetry.series import Histogram

BOUNDS = (0.5, 1.0, 2.0, 4.0)
VALUES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0, 4.0, 5.0, 1e9])


@given(st.lists(st.tuples(VALUES, st.integers(0, 300)), max_size=20))
def test_every_value_is_counted_once_in_its_bucket(runs: list[tuple[float, int]]):
    one, other = Histogram(BOUNDS), Histogram(BOUNDS)
    expected = [0] * (len(BOUNDS) + 1)
    for value, times in runs:
        expected[bisect_left(BOUNDS, value)] += times
        for _ in range(times):
            one.observe(value)
        other.observe_many(value, times)
        assert one.read()[0] == other.read()[0] == list(accumulate(expected))
    total = sum(value * times for value, times in runs)
    assert one.read()[1] == pytest.approx(total)
    assert other.read()[1] == pytest.approx(total)


def test_a_reader_in_another_thread_never_sees_fewer_than_before():
    histogram = Histogram(BOUNDS)
    done = threading.Event()

    def count() -> None:
        for _ in range(50_000):
            histogram.observe(1.0)
        done.set()

    counting = threading.Thread(target=count)
    counting.start()
    seen = 0
    while not done.is_set():
        counts, total = histogram.read()
        assert counts[-1] == total >= seen
        seen = counts[-1]
    counting.join()
    assert histogram.read() == ([0, 50_000, 50_000, 50_000, 50_000], 50_000.0)
