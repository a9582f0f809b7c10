"""A batch size sweep has the shapes that make batching worth it."""

from itertools import pairwise

import pytest

from lab.studies.batch_sizes import OUTPUT, PROMPTS, Row, study


@pytest.fixture(scope="module")
def by_prompt() -> dict[int, list[Row]]:
    rows = study(largest=16)
    return {prompt: [row for row in rows if row.prompt_tokens == prompt] for prompt in PROMPTS}


def test_throughput_rises_with_the_batch_and_so_does_the_time_per_token(by_prompt: dict[int, list[Row]]) -> None:
    for rows in by_prompt.values():
        assert [row.batch_size for row in rows] == [1, 2, 4, 8, 16]
        for smaller, larger in pairwise(rows):
            assert smaller.throughput < larger.throughput <= 2 * smaller.throughput
            assert smaller.per_token_ms <= larger.per_token_ms
            assert smaller.tpot_ms <= larger.tpot_ms


def test_short_prompts_gain_nearly_as_much_as_there_are_sequences(by_prompt: dict[int, list[Row]]) -> None:
    assert by_prompt[7][-1].throughput > 14 * by_prompt[7][0].throughput
    assert by_prompt[1750][-1].throughput < 3 * by_prompt[1750][0].throughput


def test_the_document_defines_both_figures_by_the_duration() -> None:
    row = Row(7, 4, duration_s=2.0, ttft_s=0.2)
    assert row.throughput == 4 * OUTPUT / 2.0
    assert row.per_token_ms == 200.0
    assert row.tpot_ms == pytest.approx(200.0)
