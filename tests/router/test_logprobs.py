"""Log-probabilities of the mock model's tokens."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.router.logprobs import NEVER, LogprobModel, OutputLogprobs, likeliest
from lorrery.router.request import Request
from lorrery.router.sampling import SamplingParams
from lorrery.tokenizer.base import BOS_ID, EOS_ID, FIRST_WORD_ID, NUM_WORDS
from lorrery.tokenizer.file import BuiltinTokenizer
from tests.tokenizer.test_words import ENGLISH, with_words

BUILTIN = BuiltinTokenizer()


def logprobs(seed: int = 1, mode: str = "random", tokenizer=BUILTIN) -> OutputLogprobs:
    request = Request("r", "", "", b"\3\0\0\0", SamplingParams(), (), seed, eos_id=tokenizer.eos_id)
    return LogprobModel(mode, tokenizer).of(request)


@given(st.integers(0, 2**64 - 1), st.integers(-2000, 2000), st.integers(0, NUM_WORDS - 1), st.integers(0, 20))
def test_a_word_is_one_of_the_likeliest_which_are_words_too(seed: int, at: int, word: int, num_top: int) -> None:
    one = logprobs(seed).at(at, FIRST_WORD_ID + word, num_top)
    assert one.logprob == -log(NUM_WORDS)
    assert list(one.top_token_ids[:1]) == [one.token_id][:num_top]
    assert len(set(one.top_token_ids)) == len(one.top_logprobs) == num_top
    assert all(FIRST_WORD_ID <= token_id < FIRST_WORD_ID + NUM_WORDS for token_id in one.top_token_ids)
    assert sum(map(exp, one.top_logprobs)) <= 1
    assert one == logprobs(seed).at(at, FIRST_WORD_ID + word, num_top)


def test_the_end_is_certain_and_what_the_model_never_says_is_not_listed() -> None:
    end = logprobs().at(5, EOS_ID, 3)
    assert end.top_token_ids[0] == EOS_ID
    assert list(end.top_logprobs) == [0.0, NEVER, NEVER]
    foreign = logprobs().at(-4, BOS_ID, 2)
    assert foreign.logprob == NEVER
    assert list(foreign.top_logprobs) == [pytest.approx(-log(NUM_WORDS))] * 2


def test_an_echo_is_certain() -> None:
    one = logprobs(mode="echo").at(0, 7, 1)
    assert (one.top_token_ids, one.top_logprobs) == ([7], [0.0])


@pytest.mark.parametrize("mode", ["random", "logits"])
def test_shares_of_all_words_of_a_vocabulary_add_up(mode: str) -> None:
    tokenizer = with_words(ENGLISH[:700])
    one = logprobs(5, mode, tokenizer)
    assert sum(exp(one.at(3, token_id, 0).logprob) for token_id in tokenizer.word_ids) == pytest.approx(1)
    assert one.at(3, 1, 0).logprob == NEVER


def test_logits_list_the_likeliest_first() -> None:
    one = logprobs(mode="logits")
    top = one.at(2, FIRST_WORD_ID, 20)
    shares = list(top.top_logprobs)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > -log(NUM_WORDS) + 2
    assert one.at(2, top.top_token_ids[4], 0).logprob == shares[4]
    assert one.at(3, FIRST_WORD_ID, 20).top_token_ids != top.top_token_ids


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 45))
def test_the_likeliest_are_those_of_a_stable_sort(shares: list[int], num_top: int) -> None:
    found = likeliest(np.array(shares, float), num_top).tolist()
    assert found == sorted(range(len(shares)), key=lambda at: -shares[at])[:num_top]


@pytest.mark.parametrize("num_top", [0, 2])
def test_a_rank_counts_all_that_are_likelier_listed_or_not(num_top: int) -> None:
    one = logprobs(mode="logits")
    words = range(FIRST_WORD_ID, FIRST_WORD_ID + NUM_WORDS)
    shares = {token_id: one.at(2, token_id, 0).logprob for token_id in words}
    in_order = sorted(shares.values(), reverse=True)
    for token_id in words[::97]:
        assert one.at(2, token_id, num_top).rank == in_order.index(shares[token_id]) + 1
    assert logprobs().at(2, FIRST_WORD_ID, num_top).rank == 1
    assert logprobs().at(-4, BOS_ID, num_top).rank == NUM_WORDS + 1
