"""Intervals hold what they promise where the truth is known."""

import numpy as np
import pytest

from lorrery.view.reports.spread import difference, drifts, estimate
from lorrery.vocabulary.intervals import student


def autoregressive(rng, runs, size, phi):
    """Stationary AR(1) series with mean 0, one a row."""
    noise = rng.standard_normal((size, runs))
    noise[0] /= np.sqrt(1 - phi**2)
    for at in range(1, size):
        noise[at] += phi * noise[at - 1]
    return noise.T


@pytest.mark.parametrize(("phi", "level"), [(0.0, None), (0.9, None), (0.9, 0.5), (0.9, 0.9), (0.7, 0.99)])
def test_an_interval_of_a_correlated_series_holds_the_truth_19_times_in_20(phi, level):
    series = autoregressive(np.random.default_rng(4), 500, 2000, phi)
    normal = {None: 0.0, 0.5: 0.0, 0.9: 1.281552, 0.99: 2.326348}[level]
    truth = normal / np.sqrt(1 - phi**2)
    found = [estimate(one, level, 8) for one in series]
    limits = np.array([one.limits(student(0.95, 8)) for one in found])
    assert 0.92 <= np.mean((limits[:, 0] <= truth) & (truth <= limits[:, 1])) <= 0.98
    deviations = [(high - low) / 2 for low, high in (one.limits(1.0) for one in found)]
    assert np.mean(deviations) == pytest.approx(np.std([one.value for one in found]), rel=0.25)
    assert np.mean([drifts(one, 8) for one in series]) < 0.03


@pytest.mark.parametrize("level", [None, 0.5, 0.9])
def test_two_runs_are_equal_19_times_in_20_also_where_many_values_are_the_same(level):
    steps = np.floor(4 * autoregressive(np.random.default_rng(8), 400, 2000, 0.7)) / 4
    found = [estimate(one, level, 8) for one in steps]
    lows, highs = np.array([difference(*pair, paired=False) for pair in zip(found[::2], found[1::2], strict=True)]).T
    assert np.mean((lows <= 0) & (highs >= 0)) >= 0.92


def test_what_moves_both_runs_of_a_pair_cancels():
    rng = np.random.default_rng(3)
    (slow,) = autoregressive(rng, 1, 2000, 0.9)
    for level in (None, 0.5, 0.9):
        base, other = (estimate(slow + shift + rng.normal(0, 0.01, 2000), level, 8) for shift in (0.0, 0.05))
        low, high = difference(base, other, paired=True)
        assert 0 < low < 0.05 < high
        low, high = difference(base, other, paired=False)
        assert low < 0 < high


def test_limits_of_a_long_tail_are_as_unequal_as_the_tail_and_within_the_values():
    values = np.random.default_rng(7).lognormal(0, 1.5, 1500)
    low, high = estimate(values, 0.9, 8).limits(2.3)
    middle = float(np.quantile(values, 0.9))
    assert 0 < middle - low < high - middle
    assert high < values.max()


def test_a_trend_is_told_from_chance():
    noise = autoregressive(np.random.default_rng(2), 50, 2000, 0.9)
    trend = np.linspace(-3, 3, 2000)
    assert all(drifts(one + trend, 8) for one in noise)


def test_a_long_series_is_summed_to_parts_without_a_change():
    (series,) = autoregressive(np.random.default_rng(6), 1, 20_000, 0.9)
    at = (np.arange(20_000) + 0.5) / 20_000
    waves = np.cos(np.pi * np.arange(1, 13)[:, None] * at)
    exact = float(((np.sqrt(2) / 20_000 * (waves @ (series - series.mean()))) ** 2).mean())
    assert (estimate(series, None, 12).waves ** 2).mean() == pytest.approx(exact, rel=1e-3)


def test_estimates_scale_and_leave_out_what_is_not_known():
    values = np.random.default_rng(1).lognormal(size=500)
    values[::7] = np.nan
    for level in (None, 0.5, 0.9, 0.99):
        one, scaled = estimate(values, level, 6), estimate(5 * values + 2, level, 6)
        assert scaled.value == pytest.approx(5 * one.value + 2)
        assert scaled.waves == pytest.approx(5 * one.waves)
        assert scaled.limits(2.0) == pytest.approx(tuple(5 * limit + 2 for limit in one.limits(2.0)))
