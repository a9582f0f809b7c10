"""Intervals hold what they promise where the truth is known."""

import numpy as np
import pytest

from lorrery.reports.spread import drifts, influence, spread, student


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
    found = [spread(*influence(one, level), 8) for one in series]
    values, variances = np.array([(one.value, one.variance) for one in found]).T
    inside = np.abs(values - truth) <= student(0.95, 8) * np.sqrt(variances)
    assert 0.92 <= inside.mean() <= 0.97
    assert np.sqrt(variances).mean() == pytest.approx(values.std(), rel=0.15)
    assert np.mean([drifts(influence(one, None)[1], 8) for one in series]) < 0.03


def test_a_trend_is_told_from_chance():
    noise = autoregressive(np.random.default_rng(2), 50, 2000, 0.9)
    trend = np.linspace(-3, 3, 2000)
    assert all(drifts(influence(one + trend, None)[1], 8) for one in noise)


def test_a_long_series_is_summed_to_parts_without_a_change():
    (series,) = autoregressive(np.random.default_rng(6), 1, 20_000, 0.9)
    at = (np.arange(20_000) + 0.5) / 20_000
    waves = np.cos(np.pi * np.arange(1, 13)[:, None] * at)
    exact = float(((np.sqrt(2) / 20_000 * (waves @ (series - series.mean()))) ** 2).mean())
    assert spread(*influence(series, None), 12).variance == pytest.approx(exact, rel=1e-3)


def test_influence_values_scale_and_leave_out_what_is_not_known():
    values = np.random.default_rng(1).lognormal(size=500)
    values[::7] = np.nan
    for level in (None, 0.5, 0.9):
        value, each = influence(values, level)
        scaled, further = influence(5 * values + 2, level)
        assert scaled == pytest.approx(5 * value + 2)
        assert further == pytest.approx(5 * each)
        assert each.mean() == pytest.approx(0, abs=1e-12)
        assert not each[::7].any()


@pytest.mark.parametrize(("degrees", "expected"), [(4, 2.776), (5, 2.571), (8, 2.306), (12, 2.179), (24, 2.064)])
def test_students_quantiles_are_those_of_the_tables(degrees, expected):
    assert student(0.95, degrees) == pytest.approx(expected, rel=0.005)
