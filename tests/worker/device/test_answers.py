"""A worker's answers in the terms of another vocabulary."""

from dataclasses import replace

import numpy as np
import pytest

from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.answers import Answers, Mode, Words
from lorrery.worker.device.batch import PrefillWork
from lorrery.worker.device.constant import LlmMock
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.output import EOS_TOKEN_ID, FIRST_WORD_ID, NUM_WORDS, LognormalLength, Sampler, Sampling

NONE = np.empty(0, np.uint32)
PROMPT = np.arange(8, dtype=np.uint32)
MANY = Words(np.arange(9000, 9000 - 2 * NUM_WORDS, -2, dtype=np.int64).astype(np.uint32), 17)
FEW = Words(np.array([40, 30, 50], np.uint32), 2)


def output(answers: Answers, sampling: Sampling, produced: list[int] | None = None) -> list[int]:
    gpu = MockGpu(LlmMock(), answers.table)
    before = np.array(produced or [], np.uint32)
    gpu.join(answers.sequence(1, len(PROMPT), PROMPT, before, sampling))
    gpu.begin([PrefillWork(1, len(PROMPT) + len(before), 0, samples=True)], decode=True)
    token_ids: list[int] = []
    while len(gpu):
        token_ids += gpu.advance().token_ids.tolist()
    return token_ids


def answers(mode: Mode, words: Words | None) -> Answers:
    return Answers("m", LognormalLength(50.0, 0.0), mode, words)


@pytest.mark.parametrize("mode", ["random", "logits"])
def test_tokens_are_those_of_the_vocabulary(mode: Mode) -> None:
    plain, spelt = (output(answers(mode, words), Sampling(5, 100)) for words in (None, MANY))
    assert spelt == MANY.table[plain].tolist()
    assert spelt[-1] == 17
    assert MANY.ours(np.array(spelt, np.uint32)).tolist() == plain


@pytest.mark.parametrize("mode", ["random", "logits"])
def test_a_small_vocabulary_says_its_words_again(mode: Mode) -> None:
    assert set(output(answers(mode, FEW), Sampling(5, 100, ignore_eos=True, sampler=Sampler(temperature=5.0)))) == {
        30,
        40,
        50,
    }


@pytest.mark.parametrize("words", [None, MANY, FEW])
@pytest.mark.parametrize("mode", ["random", "logits", "echo"])
def test_an_output_that_is_given_is_said_as_it_is(mode: Mode, words: Words | None) -> None:
    said = (70_000, 5, 9, 70_001)
    asked = Sampling(5, 100, true_output_tokens=9, output_token_ids=said)
    assert output(answers(mode, words), asked) == list(said)
    assert output(answers(mode, words), replace(asked, max_new_tokens=3)) == list(said[:3])
    assert output(answers(mode, words), replace(asked, stop_sequences=((5, 9),))) == list(said[:3])


@pytest.mark.parametrize("words", [None, MANY])
@pytest.mark.parametrize("mode", ["random", "logits"])
def test_one_in_a_batch_leaves_the_others_as_they_are(mode: Mode, words: Words | None) -> None:
    made, said = answers(mode, words), (70_000, 5, 9, 70_001)
    gpu = MockGpu(LlmMock(), made.table)
    for handle, sampling in ((1, Sampling(5, 30)), (2, Sampling(6, 30, output_token_ids=said)), (3, Sampling(7, 3))):
        gpu.join(made.sequence(handle, len(PROMPT), PROMPT, NONE, sampling))
    gpu.begin([PrefillWork(handle, len(PROMPT), 0, samples=True) for handle in (1, 2, 3)], decode=True)
    outputs: dict[int, list[int]] = {1: [], 2: [], 3: []}
    while len(gpu):
        step = gpu.advance()
        for handle, token_id in zip(step.handles.tolist(), step.token_ids.tolist(), strict=True):
            outputs[handle].append(token_id)
    assert outputs == {1: output(made, Sampling(5, 30)), 2: list(said), 3: output(made, Sampling(7, 3))}


@pytest.mark.parametrize("words", [MANY, FEW])
@pytest.mark.parametrize("mode", ["random", "logits"])
def test_stop_sequences_are_in_its_terms(mode: Mode, words: Words) -> None:
    sampling = Sampling(5, 100, ignore_eos=True)
    whole = output(answers(mode, words), sampling)
    stop = tuple(whole[40:43])
    first = next(at for at in range(100) if tuple(whole[at : at + 3]) == stop) + 3
    stopping = Sampling(5, 100, ignore_eos=True, stop_sequences=(stop, (1, 2)))
    assert output(answers(mode, words), stopping) == whole[:first]
    cut = first - 1
    assert output(answers(mode, words), stopping, whole[:cut]) == whole[cut:first]
    sequence = answers(mode, words).sequence(1, len(PROMPT), PROMPT, NONE, stopping)
    assert (sequence.ending.output_tokens, sequence.ending.reason) == (first, FinishReason.STOP)


def test_an_echo_is_in_the_prompts_terms_already() -> None:
    assert answers("echo", MANY).table is None
    assert output(answers("echo", MANY), Sampling(5, 100)) == PROMPT.tolist()


def test_what_is_no_word_is_none_of_ours() -> None:
    assert MANY.ours(np.array([0, 17, 9001, 10**6], np.uint32)).tolist() == [EOS_TOKEN_ID] * 4
    assert FEW.ours(np.array([40, 30, 50, 41], np.uint32)).tolist() == [3, 4, 5, EOS_TOKEN_ID]
    assert FEW.table[: FIRST_WORD_ID + 5].tolist() == [2, 2, 2, 40, 30, 50, 40, 30]
