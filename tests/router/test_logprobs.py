"""Log-probabilities of the mock model's tokens."""

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.router.logprobs import NEVER, logprobs_at
from lorrery.tokenizer.base import BOS_ID, EOS_ID, FIRST_WORD_ID, NUM_WORDS


@given(st.integers(0, 2**64 - 1), st.integers(-2000, 2000), st.integers(0, NUM_WORDS - 1), st.integers(0, 20))
def test_a_word_is_one_of_the_likeliest_which_are_words_too(seed: int, at: int, word: int, num_top: int) -> None:
    one = logprobs_at(seed, at, FIRST_WORD_ID + word, num_top)
    assert one.logprob == -log(NUM_WORDS)
    assert [token_id for token_id, _ in one.top[:1]] == [one.token_id][:num_top]
    assert len({token_id for token_id, _ in one.top}) == num_top
    assert all(FIRST_WORD_ID <= token_id < FIRST_WORD_ID + NUM_WORDS for token_id, _ in one.top)
    assert sum(exp(logprob) for _, logprob in one.top) <= 1
    assert one == logprobs_at(seed, at, FIRST_WORD_ID + word, num_top)


def test_the_end_is_certain_and_what_the_model_never_says_is_not_listed() -> None:
    assert logprobs_at(1, 5, EOS_ID, 3).top[0] == (EOS_ID, 0.0)
    assert [logprob for _, logprob in logprobs_at(1, 5, EOS_ID, 3).top[1:]] == [NEVER, NEVER]
    foreign = logprobs_at(1, -4, BOS_ID, 2)
    assert foreign.logprob == NEVER
    assert [logprob for _, logprob in foreign.top] == [pytest.approx(-log(NUM_WORDS))] * 2
