"""Columns that stand for lists: of drawn requests, and of labels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.loadgen.workload import arrivals
from lorrery.loadgen.workload.columns import WorkloadColumns
from lorrery.loadgen.workload.outcome import Labels
from lorrery.loadgen.workload.popularity import assign
from lorrery.loadgen.workload.request import WorkloadRequest


def drawn(count: int = 25_000) -> WorkloadColumns:
    rng = np.random.default_rng(3)
    return arrivals.synthetic(arrivals.poisson(5.0, count, rng), (1, 90), (1, 90), rng)


def test_drawn_requests_are_a_sequence_of_requests() -> None:
    workload = drawn()
    spelt_out = list(workload)
    assert [request.index for request in spelt_out] == list(range(25_000))
    assert workload[7] == spelt_out[7]
    assert workload[-1] == spelt_out[-1]
    assert workload[3:6] == spelt_out[3:6]
    assert isinstance(spelt_out[0].at_seconds, float)
    assert {type(value) for value in (spelt_out[0].index, spelt_out[0].prompt_tokens)} == {int}
    with pytest.raises(IndexError):
        workload[25_000]


def test_whatever_is_done_to_drawn_requests_is_done_to_each() -> None:
    workload = drawn(500)
    spelt_out = list(workload)
    indices = np.random.default_rng(4).integers(0, 3, 500)
    for change in (
        lambda requests: arrivals.scale(requests, 3.0),
        lambda requests: arrivals.limit(requests, 400, 50.0),
        lambda requests: arrivals.fitting(requests, 60, 100),
        lambda requests: assign(requests, ["a", "b", "c"], indices),
        lambda requests: arrivals.fitting(assign(requests, ["a", "b", "c"], indices), 60, 100)[5:20],
    ):
        changed: WorkloadColumns | list[WorkloadRequest] = change(workload)
        assert isinstance(changed, WorkloadColumns)
        assert changed == change(spelt_out)


@given(st.lists(st.sampled_from(["a", "b", "", None]), max_size=20))
def test_labels_are_a_sequence_of_their_values(rows: list[str | None]) -> None:
    labels = Labels.of(rows)
    assert labels == rows
    assert [labels[row] for row in range(len(labels))] == rows
    assert labels[1:3] == rows[1:3]
    assert [value for value, _ in labels.rows_of()] == list(dict.fromkeys(rows))
    for value, its_rows in labels.rows_of():
        assert its_rows.tolist() == [row for row, one in enumerate(rows) if one == value]
        assert np.flatnonzero(labels.are(value)).tolist() == its_rows.tolist()
    assert labels.as_text(lambda value: value or "none").tolist() == [value or "none" for value in rows]
    assert not labels.are("of nobody").any()
