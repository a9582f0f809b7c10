"""Tokens, ends and lengths are functions of the request and of nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.output import (
    EOS_TOKEN_ID,
    FIRST_WORD_ID,
    NUM_WORDS,
    Ending,
    LlmMockLength,
    LognormalLength,
    Sampling,
    ending,
    sequence_seed,
    token_ids,
    tokens_between,
)

LENGTHS = LognormalLength(129.0, 0.99)
NOTHING = np.empty(0, np.uint32)
seeds = st.integers(0, 2**64 - 1)


def positions(first: int, last: int) -> np.ndarray:
    return np.arange(first, last, dtype=np.int64)


def test_token_ids_do_not_change_between_versions():
    seed = sequence_seed("Llama-2-7B", "lora-0", 42)
    assert seed == 11532424213299948763
    assert token_ids(np.array([seed], np.uint64), positions(0, 4)).tolist() == [836, 1248, 1185, 1795]


def test_tokens_are_uniform_over_the_words():
    ids = token_ids(np.array([[sequence_seed("m", "", s)] for s in range(200)], np.uint64), positions(0, 1000))
    assert ids.dtype == np.uint32
    assert ids.min() == FIRST_WORD_ID
    assert ids.max() == FIRST_WORD_ID + NUM_WORDS - 1
    counts = np.bincount(ids.ravel() - FIRST_WORD_ID, minlength=NUM_WORDS)
    expected = ids.size / NUM_WORDS
    # Chi-squared over 1,904 degrees of freedom; six standard deviations.
    assert abs(((counts - expected) ** 2 / expected).sum() - (NUM_WORDS - 1)) < 6 * (2 * NUM_WORDS) ** 0.5


def test_model_adapter_and_seed_all_count():
    all_seeds = {sequence_seed(m, a, s) for m in ("m", "n") for a in ("", "a", "b") for s in (0, 1, 2**64 - 1)}
    assert len(all_seeds) == 18
    assert sequence_seed("ab", "c", 0) != sequence_seed("a", "bc", 0)


@settings(deadline=None)
@given(some=st.lists(seeds, min_size=1, max_size=20), at=st.integers(0, 10**6))
def test_a_token_does_not_depend_on_the_batch(some, at):
    whole = token_ids(np.array(some, np.uint64), np.full(len(some), at, np.int64))
    alone = [int(token_ids(np.array([seed], np.uint64), positions(at, at + 1))[0]) for seed in some]
    assert whole.tolist() == alone


def test_true_length_ends_with_eos_and_counts_it():
    sampling = Sampling(1, max_new_tokens=50, true_output_tokens=5)
    end = ending(9, sampling, 3, NOTHING, LENGTHS)
    assert end == Ending(5, FinishReason.EOS)
    tokens = tokens_between(9, 0, 5, end)
    assert tokens[-1] == EOS_TOKEN_ID
    assert EOS_TOKEN_ID not in tokens[:-1]


def test_eos_wins_over_length_at_the_same_token():
    assert ending(9, Sampling(1, 5, true_output_tokens=5), 3, NOTHING, LENGTHS) == Ending(5, FinishReason.EOS)
    assert ending(9, Sampling(1, 4, true_output_tokens=5), 3, NOTHING, LENGTHS) == Ending(4, FinishReason.LENGTH)


def test_ignored_eos_runs_to_max_new_tokens():
    sampling = Sampling(1, 5000, ignore_eos=True, true_output_tokens=5)
    end = ending(9, sampling, 3, NOTHING, LENGTHS)
    assert end == Ending(5000, FinishReason.LENGTH)
    assert EOS_TOKEN_ID not in tokens_between(9, 0, 5000, end)


def test_lognormal_lengths_have_the_median_and_spread_of_the_settings():
    lengths = np.array([LENGTHS.draw(sequence_seed("m", "a", s), 10).output_tokens for s in range(4000)])
    assert lengths.min() >= 1
    assert np.median(lengths) == pytest.approx(129, rel=0.06)
    assert np.log(lengths).std() == pytest.approx(0.99, rel=0.05)
    assert LognormalLength(20.0, 0.0).draw(5, 1) == Ending(20, FinishReason.EOS)


def test_llm_mock_ends_by_a_step_without_a_token():
    sampling = Sampling(1, max_new_tokens=1000)
    assert ending(9, sampling, 100, NOTHING, LlmMockLength()) == Ending(70, FinishReason.LENGTH, extra_step=True)
    # The limit comes first, or with the last token: no further step is needed.
    assert ending(9, Sampling(1, 70), 100, NOTHING, LlmMockLength()) == Ending(70, FinishReason.LENGTH)


@settings(deadline=None)
@given(
    seed=seeds,
    at=st.integers(0, 1500),
    length=st.integers(1, 5),
    num_produced=st.integers(0, 1500),
    max_new=st.integers(1, 1600),
)
def test_stop_sequence_ends_where_it_is_first_complete(seed, at, length, num_produced, max_new):
    free = Ending(10**6, FinishReason.LENGTH)
    text = tokens_between(seed, 0, 1600, free).tolist()
    stop = tuple(text[at : at + length])
    unused = (1, 1)
    first = next(i + length for i in range(len(text)) if tuple(text[i : i + length]) == stop)
    produced = np.array(text[: min(num_produced, first - 1)], np.uint32)
    end = ending(seed, Sampling(0, max_new, True, None, (unused, stop)), 7, produced, LENGTHS)
    expected = Ending(first, FinishReason.STOP) if first <= max_new else Ending(max_new, FinishReason.LENGTH)
    assert end == expected


def test_eos_comes_after_min_new_tokens():
    def end(min_new: int, most: int = 50, true: int = 5) -> Ending:
        return ending(9, Sampling(1, most, true_output_tokens=true, min_new_tokens=min_new), 3, NOTHING, LENGTHS)

    assert [end(least) for least in (0, 4)] == [Ending(5, FinishReason.EOS)] * 2
    assert end(5) == Ending(6, FinishReason.EOS)
    assert end(20) == Ending(21, FinishReason.EOS)
    assert end(50) == end(50, true=60) == Ending(50, FinishReason.LENGTH)
    assert EOS_TOKEN_ID not in tokens_between(9, 0, 20, end(20))


def test_other_natural_ends_come_with_the_last_of_min_new_tokens():
    mock = ending(9, Sampling(1, 1000, min_new_tokens=80), 100, NOTHING, LlmMockLength())
    assert mock == Ending(80, FinishReason.LENGTH, extra_step=True)
    prompt = np.array([7, 8, 9], np.uint32)
    echo = ending(9, Sampling(1, 1000, min_new_tokens=5), 3, NOTHING, LENGTHS, prompt)
    assert echo == Ending(5, FinishReason.EOS)


@settings(deadline=None)
@given(seed=seeds, stop=st.integers(0, 600), least=st.integers(0, 1200), num_produced=st.integers(0, 1200))
def test_a_stop_sequence_counts_behind_min_new_tokens(seed, stop, least, num_produced):
    text = tokens_between(seed, 0, 1200, Ending(10**6, FinishReason.LENGTH)).tolist()
    token = text[stop]
    first = next((at + 1 for at, other in enumerate(text) if other == token and at >= least), None)
    produced = np.array(text[: min(num_produced, (first or 1200) - 1)], np.uint32)
    end = ending(seed, Sampling(0, 1200, True, None, ((token,),), least), 7, produced, LENGTHS)
    assert end == (Ending(1200, FinishReason.LENGTH) if first is None else Ending(first, FinishReason.STOP))


def test_a_stop_sequence_may_begin_with_produced_tokens_that_the_model_never_says():
    foreign = 5000
    (following,) = token_ids(np.array([9], np.uint64), np.array([1])).tolist()
    sampling = Sampling(1, 50, True, stop_sequences=((foreign, following), (foreign, foreign)))
    end = ending(9, sampling, 3, np.array([foreign], np.uint32), LENGTHS)
    assert end == Ending(2, FinishReason.STOP)
    assert ending(9, sampling, 3, NOTHING, LENGTHS) == Ending(50, FinishReason.LENGTH)


def test_eos_is_no_part_of_a_stop_sequence():
    sampling = Sampling(1, 50, true_output_tokens=5, stop_sequences=((EOS_TOKEN_ID,),))
    assert ending(9, sampling, 3, NOTHING, LENGTHS) == Ending(5, FinishReason.EOS)


def test_echo_ends_with_the_prompt():
    prompt = np.array([5, 6, 7], np.uint32)
    end = ending(9, Sampling(1, 50, true_output_tokens=40), 3, NOTHING, LENGTHS, prompt)
    assert end == Ending(3, FinishReason.EOS)
    assert tokens_between(9, 0, 3, end, prompt).tolist() == [5, 6, 7]
    stopped = ending(9, Sampling(1, 50, stop_sequences=((6,),)), 3, NOTHING, LENGTHS, prompt)
    assert stopped == Ending(2, FinishReason.STOP)


def test_echo_goes_round_where_eos_is_ignored():
    prompt = np.array([5, 6, 7], np.uint32)
    end = ending(9, Sampling(1, 5, ignore_eos=True), 3, NOTHING, LENGTHS, prompt)
    assert end == Ending(5, FinishReason.LENGTH)
    assert tokens_between(9, 0, 5, end, prompt).tolist() == [5, 6, 7, 5, 6]


def test_max_new_tokens_below_one_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        ending(9, Sampling(1, 0), 3, NOTHING, LENGTHS)
