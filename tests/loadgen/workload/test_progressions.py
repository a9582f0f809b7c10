"""Mean and percentiles of progressions are those of the values spelt out."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.loadgen.workload.distribution import MOST_SPELT_OUT, Distribution, Rows, describe, distribution, spelt_out

MODULE = "lorrery.loadgen.workload.distribution"
ROW = st.tuples(
    st.one_of(st.integers(0, 20), st.integers(0, 10**13)),
    st.one_of(st.integers(-3, 3), st.integers(-(10**6), 10**9)),
    st.integers(1, 60),
    st.integers(1, 300),
)


def chunks_of(rows: list[tuple[int, ...]], at_once: int = 3) -> Callable[[], Iterator[Rows]]:
    table = np.array(rows, np.int64).reshape(-1, 4)
    return lambda: (table[begin : begin + at_once] for begin in range(0, len(table), at_once))


def oracle(rows: list[tuple[int, ...]]) -> Distribution:
    values, times = spelt_out(np.array(rows, np.int64).reshape(-1, 4))
    return distribution(np.repeat(values, times) / 1e12)


def check(rows: list[tuple[int, ...]]) -> None:
    found, expected = describe(chunks_of(rows), lambda ps: ps / 1e12), oracle(rows)
    assert found.count == expected.count
    assert (found.p50, found.p90, found.p99) == (expected.p50, expected.p90, expected.p99)
    assert found.mean == pytest.approx(expected.mean, abs=1e-12)


@pytest.fixture
def looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.MOST_SPELT_OUT", 4)
    monkeypatch.setattr(f"{MODULE}.MOST_ROWS", 2)
    monkeypatch.setattr(f"{MODULE}._SAMPLE", 16)


@given(rows=st.lists(ROW, max_size=12))
def test_what_is_few_is_described_as_when_spelt_out(rows: list[tuple[int, ...]]) -> None:
    check(rows)


@pytest.mark.usefixtures("looks_again_and_again")
def test_what_is_much_is_described_as_when_spelt_out() -> None:
    @settings(max_examples=60)
    @given(rows=st.lists(ROW, max_size=8))
    def hold(rows: list[tuple[int, ...]]) -> None:
        check(rows)

    hold()


def test_a_million_values_are_described_as_when_spelt_out() -> None:
    rng = np.random.default_rng(1)
    num = 5_000
    rows = np.column_stack((
        rng.integers(8 * 10**9, 9 * 10**9, num),
        rng.choice([0, 10_000, 250_000], num),
        rng.integers(1, 400, num),
        rng.integers(1, 3, num),
    ))  # fmt: skip
    rows[::50, 0] *= 40
    assert int(rows[:, 2].sum()) > 3 * MOST_SPELT_OUT
    check([tuple(row) for row in rows.tolist()])


def test_many_equal_values_take_one_look() -> None:
    assert describe(chunks_of([(7, 0, 10**9, 10**3)] * 5), float) == Distribution(5 * 10**12, 7, 7, 7, 7)
