"""Rows come back as columns, in order of the one that is asked for."""

import numpy as np
import pytest

from lorrery.simulator import spilled_rows
from lorrery.simulator.spilled_rows import RowColumns


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_a_value_beyond_its_columns_type_is_refused(value: int) -> None:
    rows = RowColumns({"key": np.int64, "code": np.int32})
    for code in (2**31 - 1, -(2**31), value):
        rows.add((value, code))
    with pytest.raises(OverflowError, match=f"code: {value} is beyond int32"):
        rows.take(sort_by="key")


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 10, 40])
def test_columns_are_sorted_by_one_of_them(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spilled_rows, "CHUNK_ROWS", 3)
    rows = RowColumns({"key": np.int64, "code": np.int32, "same": np.int64})
    for number in range(num_rows):
        rows.add((-number * 10**12, number, 7))
    assert len(rows) == num_rows
    columns = rows.take(sort_by="key")
    assert columns["key"].tolist() == [-number * 10**12 for number in reversed(range(num_rows))]
    assert columns["code"].tolist() == list(reversed(range(num_rows)))
    assert columns["code"].dtype == np.int32
    assert columns["same"].tolist() == [7] * num_rows
    assert len(rows) == 0
