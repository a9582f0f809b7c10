"""Sampling that shows: each parameter does to the output what S-LoRA's sampler makes of it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.outputs import context_of, model_logits
from lorrery.worker.device.answers import (
    Answers,
    SampledWords,
    Words,
    draw,
    kept,
    penalised,
)
from lorrery.worker.device.output import FIRST_WORD_ID, GREEDY, NUM_WORDS, LognormalLength, Sampler, Sampling
from lorrery.worker.device.rows import DeviceSequence

PROMPT = np.arange(3, 43, dtype=np.uint32)
CONTEXT = context_of("a", PROMPT.tobytes())
NONE = np.empty(0, np.uint32)
ANSWERS = Answers("m", LognormalLength(50.0, 0.5), "logits")


def words(sampler: Sampler, num_tokens: int = 400, seed: int = 1, context: int = CONTEXT) -> list[int]:
    return SampledWords(context, seed, sampler, NONE).tokens(0, num_tokens).tolist()


def entropy(sampler: Sampler, position: int = 0) -> float:
    _, shares = kept(model_logits(CONTEXT, position), sampler)
    shares = shares / shares.sum()
    return float(-(shares * np.log(shares)).sum())


def test_logits_have_the_spread_that_they_are_said_to_have() -> None:
    logits = np.concatenate([model_logits(context, 5) for context in range(50)])
    assert abs(logits.mean()) < 0.1
    assert abs(logits.std() - math.hypot(2.5, 1.7)) < 0.1
    assert not np.array_equal(model_logits(1, 0), model_logits(1, 1))
    assert not np.array_equal(model_logits(1, 0), model_logits(2, 0))


def test_a_higher_temperature_is_more_entropy() -> None:
    levels = [np.mean([entropy(Sampler(temperature=t), at) for at in range(40)]) for t in (0.2, 0.7, 1.0, 1.5, 5.0)]
    assert levels == sorted(levels)
    assert levels[0] < 1 < levels[2] < 5 < levels[4] < math.log(NUM_WORDS)
    distinct = [len(set(words(Sampler(temperature=t)))) for t in (0.2, 1.0, 5.0)]
    assert distinct == sorted(distinct)
    assert distinct[0] < distinct[2] / 2


@pytest.mark.parametrize("top_k", [1, 2, 50, NUM_WORDS, NUM_WORDS + 5])
def test_top_k_keeps_so_many_of_the_likeliest(top_k: int) -> None:
    logits = model_logits(CONTEXT, 3)
    chosen, _ = kept(logits, Sampler(top_k=top_k))
    assert chosen.tolist() == np.argsort(-logits, kind="stable")[:top_k].tolist()
    drawn = {draw(logits, Sampler(top_k=top_k, temperature=3.0), u) for u in np.linspace(0, 1, 4000, endpoint=False)}
    assert drawn <= set(chosen.tolist())
    assert len(drawn) == top_k if top_k <= 50 else len(drawn) > 50


@given(st.floats(0.01, 1.0), st.integers(0, 200))
@settings(max_examples=50)
def test_top_p_keeps_the_fewest_words_that_have_that_much(top_p: float, position: int) -> None:
    logits = model_logits(CONTEXT, position)
    _, everything = kept(logits, Sampler())
    chosen, shares = kept(logits, Sampler(top_p=top_p))
    assert shares.tolist() == everything[: len(chosen)].tolist()
    assert shares[:-1].sum() <= top_p
    assert len(chosen) == NUM_WORDS or shares.sum() > top_p - 1e-9


def test_top_p_and_top_k_both_hold() -> None:
    logits = model_logits(CONTEXT, 0)
    wide, narrow = Sampler(top_p=0.99, top_k=5), Sampler(top_p=0.2, top_k=500)
    assert len(kept(logits, wide)[0]) == 5
    assert len(kept(logits, narrow)[0]) == len(kept(logits, replace(narrow, top_k=0))[0]) < 500


def test_draws_follow_the_probabilities() -> None:
    sampler = Sampler(temperature=1.3, top_k=30)
    logits = model_logits(CONTEXT, 7)
    chosen, shares = kept(logits, sampler)
    shares = shares / shares.sum()
    num_draws = 4000
    rng = np.random.default_rng(5)
    drawn = [draw(logits, sampler, u) for u in rng.random(num_draws)]
    counts = np.array([drawn.count(word) for word in chosen])
    expected = shares * num_draws
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert counts.sum() == num_draws
    assert statistic < 29 + 5 * math.sqrt(2 * 29)


def test_seeds_draw_by_the_probabilities_too() -> None:
    """The draws of many requests at one place, as the workers make them."""
    sampler = Sampler(top_k=8)
    chosen, shares = kept(model_logits(CONTEXT, 0), sampler)
    expected = shares / shares.sum() * 4000
    drawn = [SampledWords(CONTEXT, seed * 7919, sampler, NONE).tokens(0, 1)[0] - FIRST_WORD_ID for seed in range(4000)]
    counts = np.array([drawn.count(word) for word in chosen])
    assert ((counts - expected) ** 2 / expected).sum() < 7 + 5 * math.sqrt(14)


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"presence_penalty": 1.0, "frequency_penalty": 1.0}],
)
@pytest.mark.parametrize("sampler", [GREEDY, Sampler(), Sampler(temperature=0.5, top_p=0.9)])
def test_penalties_are_fewer_repeats(sampler: Sampler, penalty: dict[str, float]) -> None:
    plain, less = [], []
    for context in range(8):
        plain.append(len(set(words(sampler, 150, context=context))))
        less.append(len(set(words(replace(sampler, **penalty), 150, context=context))))
    assert sum(less) > sum(plain) * 1.05
    rewarded = replace(sampler, **{name: -value for name, value in penalty.items()})
    assert len(set(words(rewarded, 150))) < len(set(words(sampler, 150)))


def test_penalties_are_what_they_are_in_s_lora() -> None:
    logits, counts = np.array([1.0, 2.0, 3.0]), np.array([0, 1, 4])
    both = Sampler(presence_penalty=0.5, frequency_penalty=0.25)
    assert penalised(logits, counts, both).tolist() == [1.0, 2.0 - 0.25 - 0.5, 3.0 - 1.0 - 0.5]


def test_an_infinite_penalty_never_repeats_while_there_are_words() -> None:
    said = words(replace(GREEDY, presence_penalty=math.inf), NUM_WORDS)
    assert len(set(said)) == NUM_WORDS
    assert len(words(replace(Sampler(), frequency_penalty=math.inf), NUM_WORDS + 50)) == NUM_WORDS + 50


def test_greedy_says_the_same_whatever_the_seed() -> None:
    assert words(GREEDY, seed=1) == words(GREEDY, seed=2)
    assert words(GREEDY)[:5] == [FIRST_WORD_ID + int(model_logits(CONTEXT, at).argmax()) for at in range(5)]
    assert words(Sampler(), seed=1) == words(Sampler(), seed=1) != words(Sampler(), seed=2)
    cold = words(Sampler(temperature=1e-4), seed=3)
    assert cold == words(GREEDY)


def sequence(sampling: Sampling, produced: list[int] | None = None, answers: Answers = ANSWERS) -> DeviceSequence:
    return answers.sequence(1, len(PROMPT), PROMPT, np.array(produced or [], np.uint32), sampling, "a")


def said(one: DeviceSequence, first: int = 0) -> list[int]:
    assert one.sampled is not None
    return one.sampled.tokens(first, one.ending.output_tokens).tolist()


def test_greedy_ends_at_the_same_place_whatever_the_seed() -> None:
    ends = [sequence(Sampling(seed, 1000, sampler=GREEDY)).ending for seed in range(5)]
    assert {(end.output_tokens, end.reason) for end in ends} == {(ends[0].output_tokens, FinishReason.EOS)}
    sampled = {sequence(Sampling(seed, 1000, sampler=Sampler())).ending.output_tokens for seed in range(5)}
    assert len(sampled) > 1


def test_the_prompt_and_the_adapter_are_what_an_output_is_about() -> None:
    one = sequence(Sampling(1, 20, ignore_eos=True))
    other_prompt = ANSWERS.sequence(1, 3, PROMPT[:3], NONE, Sampling(1, 20, ignore_eos=True), "a")
    other_adapter = ANSWERS.sequence(1, len(PROMPT), PROMPT, NONE, Sampling(1, 20, ignore_eos=True), "b")
    assert len({tuple(said(each)) for each in (one, other_prompt, other_adapter)}) == 3


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 59),
    st.sampled_from([GREEDY, Sampler(), Sampler(temperature=2.0, presence_penalty=1.0, frequency_penalty=0.5)]),
    st.sampled_from([None, Words(np.arange(5000, 5000 + NUM_WORDS, dtype=np.uint32), 9), Words(np.arange(7, 20), 2)]),
)
@settings(max_examples=40)
def test_a_resumption_goes_on_as_the_sequence_would(
    seed: int, cut: int, sampler: Sampler, spelling: Words | None
) -> None:
    answers = replace(ANSWERS, words=spelling)
    sampling = Sampling(seed, 60, ignore_eos=True, sampler=sampler)
    whole = said(sequence(sampling, answers=answers))
    produced = whole[:cut] if spelling is None else spelling.table[whole[:cut]].tolist()
    rest = sequence(sampling, produced, answers)
    assert said(rest, cut) == whole[cut:]


def test_a_stop_sequence_ends_it_where_it_is_said_first() -> None:
    sampling = Sampling(3, 300, ignore_eos=True, sampler=Sampler())
    whole = said(sequence(sampling))
    stop = tuple(whole[100:102])
    end = sequence(replace(sampling, stop_sequences=(stop,))).ending
    first = next(at for at in range(300) if tuple(whole[at : at + 2]) == stop) + 2
    assert (end.output_tokens, end.reason) == (first, FinishReason.STOP)
    spelling = Words(np.arange(70_000, 70_000 + NUM_WORDS, dtype=np.uint32), 9)
    spelt = replace(sampling, stop_sequences=(tuple(spelling.table[list(stop)].tolist()),))
    resumed = sequence(spelt, spelling.table[whole[:50]].tolist(), replace(ANSWERS, words=spelling))
    assert (resumed.ending.output_tokens, resumed.ending.reason) == (first, FinishReason.STOP)


def test_a_prompt_that_did_not_come_along_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 prompt token ids of 5"):
        ANSWERS.sequence(1, 5, NONE, NONE, Sampling(1, 5))
