"""Seed document 002's demonstration makes the passes that its own loop makes."""

import pytest

from lab.studies.static_continuous import measure


def test_continuous_batching_makes_the_documents_own_passes() -> None:
    row = measure("continuous").row
    assert (row["prefill_passes"], row["decode_passes"]) == (6, 126)
    assert row["mean_places_that_give_a_token"] == pytest.approx((4 * 99 + 28 * 9) / 126)
    assert row["mean_places_taken"] == row["mean_places_that_give_a_token"]


def test_static_batching_runs_each_batch_to_its_longest_end() -> None:
    outcome = measure("static")
    assert outcome.row["passes"] == 400
    assert outcome.row["prefill_passes"] == 4
    assert outcome.row["mean_places_taken"] == 8
    assert {left - first for first, _, left in outcome.spans} == {100}


def test_a_request_has_as_many_useful_passes_as_it_asks_tokens() -> None:
    for way, prefills_of_others in (("static", 0), ("continuous", 5)):
        for index, (first, useful, _) in enumerate(measure(way).spans):
            asked = 10 if index % 8 else 100
            assert asked <= useful - first <= asked + prefills_of_others
