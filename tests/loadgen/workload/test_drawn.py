"""Requests in columns have one value in each, and adapters that there are."""

import numpy as np
import pytest

from lorrery.loadgen.workload.columns import WorkloadColumns


def drawn(num_adapters: int | None = None) -> WorkloadColumns:
    adapter = None if num_adapters is None else np.zeros(num_adapters, np.int32)
    return WorkloadColumns(
        np.arange(5, dtype=np.int32), np.arange(5.0), np.arange(5) + 1, np.arange(5) + 1, ["a"], adapter
    )


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 1, 0], "columns have 5, 5, 5, 5, 3 rows"),
        ([0, 1, 0, 1, -1], "index -1 stands for none of 2 adapters"),
        ([0, 1, 0, 1, 2], "index 2 stands for none of 2 adapters"),
        ([2**32, 0, 0, 0, 0], "index 4294967296 stands for none"),
    ],
)
def test_indices_that_stand_for_no_adapter_of_a_request_are_refused(indices: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drawn().with_adapters(["b", "c"], np.array(indices))


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="columns have 5, 5, 5, 5, 3 rows"):
        drawn(num_adapters=3)


def test_each_request_has_the_adapter_of_its_index() -> None:
    requests = drawn().with_adapters(["b", "c"], np.array([1, 0, 0, 1, 1]))
    assert [request.adapter_id for request in requests] == ["c", "b", "b", "c", "c"]
    assert {request.adapter_id for request in drawn()} == {None}
