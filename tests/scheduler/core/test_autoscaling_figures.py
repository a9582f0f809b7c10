"""Gauges, rates and percentiles of scraped samples, as Prometheus computes them."""

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.autoscaling import METRICS, Reading, Sample, Window, quantile
from lorrery.service.telemetry.series import Histogram

BOUNDS = (0.1, 0.5, 1.0, 5.0)


def sample(at: float, counts: tuple[int, ...] = (0, 0, 0, 0, 0), **given) -> Sample:
    buckets = dict.fromkeys(("time_to_first_token_seconds", "request_queue_time_seconds"), (BOUNDS, counts))
    return Sample(at, **{"num_ready": 2} | given, buckets=buckets)


def test_a_percentile_is_interpolated_within_its_bucket():
    # histogram_quantile's example in reverse: ten values up to 0.5, of which four are up to 0.1.
    assert quantile(0.5, BOUNDS, (4, 10, 10, 10, 10)) == pytest.approx(0.1 + 0.4 * (5 - 4) / 6)
    assert quantile(0.2, BOUNDS, (4, 10, 10, 10, 10)) == pytest.approx(0.05)
    assert quantile(0.99, BOUNDS, (0, 0, 0, 0, 3)) == 5.0  # beyond the last bound: that bound
    assert quantile(0.5, BOUNDS, (0, 0, 0, 0, 0)) is None


@given(
    st.lists(st.sampled_from([0.05, 0.3, 0.7, 2.0, 4.0]), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99])
)
def test_a_percentile_lies_in_the_bucket_of_the_value_of_its_rank(values: list[float], share: float):
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    found = quantile(share, BOUNDS, histogram.read()[0])
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    bucket = bisect_left(BOUNDS, exact)
    assert found is not None
    assert (BOUNDS[bucket - 1] if bucket else 0.0) < found <= BOUNDS[bucket] + 1e-9


def test_a_window_looks_at_what_happened_within_it():
    window = Window(60)
    assert window.read("num_requests_waiting") is None
    window.add(sample(0, request_success=1))
    assert window.read("request_success_per_second") is None
    for at in (30, 60, 90):
        window.add(sample(at, (at, at, at, at, at), request_success=at, generation_tokens=10 * at))
    assert window.read("generation_tokens_per_second") == Reading(10.0, True, 2)
    assert window.read("request_success_per_second") == Reading(1.0, True, 2)
    assert window.read("time_to_first_token_seconds_p90") == Reading(pytest.approx(0.09), is_total=False)


@pytest.mark.parametrize(
    ("seconds", "per_second"),
    [
        (1, 7 / 15),  # two samples at least
        (15, 7 / 15),
        (16, 12 / 30),  # back to the last sample before its beginning
        (30, 12 / 30),
        (31, 15 / 45),
        (59, 16 / 60),
        (3600, 16 / 60),
    ],
)
def test_a_rate_is_over_the_window_or_more_never_over_less(seconds: float, per_second: float):
    window = Window(seconds)
    for number in range(5):
        window.add(sample(15 * number, request_success=number * number))
    assert window.read("request_success_per_second") == Reading(pytest.approx(per_second), True, 2)


def test_a_percentile_of_nothing_is_zero_and_gauges_are_of_the_last_sample():
    window = Window(60)
    window.add(sample(0, (5, 5, 5, 5, 5)))
    window.add(sample(50, (5, 5, 5, 5, 5), num_requests_waiting=7, kv_cache_usage_perc=0.5))
    assert window.read("time_to_first_token_seconds_p99") == Reading(0.0, is_total=False)
    assert window.read("num_requests_waiting") == Reading(7.0, True, 2)
    assert window.read("gpu_cache_usage_perc") == window.read("kv_cache_usage_perc") == Reading(0.5, True, 2)


def test_every_metric_has_a_value_after_two_samples():
    window = Window(60)
    window.add(sample(0))
    window.add(sample(15))
    assert all(window.read(metric) is not None for metric in METRICS)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(0, 50), st.integers(0, 60), st.integers(1, 60)
)
def test_a_delayed_window_says_what_one_without_delay_said_so_long_before(
    gaps: list[int], delay: int, later: int, seconds: int
):
    ats = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    samples = [sample(at, (at, at, at, at, at), num_requests_waiting=at, prompt_tokens=at * at) for at in ats]
    late, fresh = Window(seconds, delay), Window(seconds)
    now = ats[-1] + later
    for one in samples:
        late.add(one)
        if one.at_seconds + delay <= now:
            fresh.add(one)
    late.pass_until(now)
    assert late.read_all(METRICS) == fresh.read_all(METRICS)
