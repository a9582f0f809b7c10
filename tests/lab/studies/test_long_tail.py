"""Seed document 000's questions have the answers that docs/policies.md gives."""

import pytest

from lab.studies.long_tail import QUESTIONS, WAYS, Row, measure

Answers = dict[tuple[str, str], Row]


@pytest.fixture(scope="module")
def answers() -> Answers:
    return {(row.way, row.question): row for way in WAYS for row in measure(way)}


def test_a_short_prompt_waits_for_the_long_one_before_it_however_one_batches(answers: Answers) -> None:
    for way in WAYS:
        for question in ("budget", "prefill"):
            row = answers[way, question]
            assert row.with_ms > row.without_ms + 500


def test_one_that_does_not_fit_waits_ten_more_steps_under_slora(answers: Answers) -> None:
    def extra_ms(way: str) -> float:
        return answers[way, "budget"].with_ms - answers[way, "prefill"].with_ms

    assert extra_ms("S-LoRA's loop") > extra_ms("continuous") + 100


def test_only_chunks_keep_a_running_stream_going(answers: Answers) -> None:
    assert answers["chunked (512)", "stall"].with_ms < 100
    for way in ("S-LoRA's loop", "continuous", "mixed"):
        assert answers[way, "stall"].with_ms > 500


def test_only_static_batching_keeps_a_short_output_to_the_long_ones_end(answers: Answers) -> None:
    for way in WAYS:
        row = answers[way, "decode"]
        assert (row.with_ms > 10 * row.without_ms) == (way == "static")


def test_every_question_is_answered(answers: Answers) -> None:
    assert {question for _, question in answers} == set(QUESTIONS)
