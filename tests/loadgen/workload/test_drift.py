import numpy as np
import pytest

from lorrery.loadgen.option_texts import parse_bursts, parse_drift
from lorrery.loadgen.workload.popularity import Diurnal, Flash, Shift, drifting_indices
from lorrery.service.errors import SettingsError

COUNT = 200_000


def shares(indices, num_adapters):
    return np.bincount(indices, minlength=num_adapters) / len(indices)


def draw(drift, at_seconds, num_adapters=4, exponent=1.0, seed=0):
    return drifting_indices(drift, num_adapters, exponent, at_seconds, np.random.default_rng(seed))


def zipf(num_adapters, exponent=1.0):
    weights = np.arange(1, num_adapters + 1.0) ** -exponent
    return weights / weights.sum()


@pytest.mark.parametrize("amplitude", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("at", [0.0, 2.5, 6.0])
def test_diurnal_popularity_has_its_formula_at_each_time(amplitude, at):
    found = shares(draw(Diurnal(10.0, amplitude), np.full(COUNT, at)), 4)
    weights = zipf(4) * (1 + amplitude * np.sin(2 * np.pi * (at / 10.0 + np.arange(4) / 4)))
    assert found == pytest.approx(weights / weights.sum(), abs=0.006)


def test_diurnal_popularity_is_exact_where_the_popular_are_asleep():
    """Rejection alone would hardly find one of those that are left."""
    drift, exponent = Diurnal(1.0, 1.0), 12.0
    found = shares(draw(drift, np.full(3000, 0.75), 3, exponent), 3)
    weights = zipf(3, exponent) * (1 + np.sin(2 * np.pi * (0.75 + np.arange(3) / 3)))
    assert found == pytest.approx(weights / weights.sum(), abs=0.03)


def test_one_adapter_is_always_that_one():
    assert set(draw(Diurnal(1.0), np.full(100, 0.75), 1).tolist()) == {0}


def test_a_flash_crowd_has_its_share_in_its_time_only():
    at = np.linspace(0, 30, COUNT)
    indices = draw(Flash(10.0, 10.0, 0.6), at)
    lasts = (at >= 10) & (at < 20)
    usual = zipf(4)
    assert shares(indices[~lasts], 4) == pytest.approx(usual, abs=0.006)
    assert shares(indices[lasts], 4) == pytest.approx(0.4 * usual + 0.6 * np.eye(4)[3], abs=0.006)
    with pytest.raises(ValueError, match="adapter is 4; with 4 adapters it must be 0 to 3"):
        draw(Flash(1.0, 1.0, adapter=4), at)


def test_ranks_move_on_all_at_once():
    at = np.repeat([0.0, 5.0, 12.0], COUNT // 4)
    indices = draw(Shift(5.0, 3), at).reshape(3, -1)
    for moves, row in zip((0, 1, 2), indices, strict=True):
        assert shares(row, 4) == pytest.approx(np.roll(zipf(4), 3 * moves), abs=0.01)


def test_equal_seeds_draw_alike():
    at = np.linspace(0, 30, 1000)
    for drift in (Diurnal(7.0), Flash(3.0, 5.0), Shift(2.0)):
        assert draw(drift, at, seed=1).tolist() == draw(drift, at, seed=1).tolist()
        assert draw(drift, at, seed=1).tolist() != draw(drift, at, seed=2).tolist()


def test_drift_is_read_from_text():
    assert parse_drift("diurnal,period=600,amplitude=0.5") == Diurnal(600.0, 0.5)
    assert parse_drift("flash,at=60,for=30,share=0.8,adapter=2") == Flash(60.0, 30.0, 0.8, 2)
    assert parse_drift("shift,every=60") == Shift(60.0, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nightly", "expected diurnal, flash, shift"),
        ("diurnal", "period is not given"),
        ("diurnal,period=0", "0.001 or more"),
        ("diurnal,period=x", "expected a number"),
        ("diurnal,period=1,period=2", "once at most"),
        ("flash,at=1,for=1,adapter=1.5", "whole number"),
        ("flash,at=1,for=1,share=2", "0 to 1"),
        ("shift,every=60,at=1", "'at'"),
    ],
)
def test_drift_that_is_none_is_refused(text, why):
    with pytest.raises(SettingsError, match=why):
        parse_drift(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("for=1", "factor is not given"),
        ("factor=0.5,for=1", "1 to 1,000,000"),
        ("factor=2,for=1,share=1", "to less than 1"),
    ],
)
def test_bursts_that_are_none_are_refused(text, why):
    with pytest.raises(SettingsError, match=why):
        parse_bursts(text)
