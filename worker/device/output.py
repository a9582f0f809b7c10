"""Output of the mock model: token ids, and where and why a sequence ends.

A token id is a pure function of (model, adapter, request seed, position); the mock model reads neither the sampling
parameters (a greedy and a sampled request with the same seed have the same output) nor the earlier output. So the
worker, the batch and the number of resumptions make no difference to a token.

An output may also be *given*: it is the prompt in echo mode, and what a request asks for word for word, in any mode. It
is given once, or repeated where end-of-sequence is ignored, and the model adds no EOS token. In logits mode words are
drawn by the sampling parameters (`answers`).

Vocabulary: 0 unknown, 1 beginning of sequence, 2 end of sequence (S-LoRA's `eos_id`), then NUM_WORDS words.
"""

import hashlib
from collections.abc import Container
from dataclasses import dataclass
from math import exp
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.outputs import START, STEP, StopAutomaton, hash64


@dataclass(frozen=True, slots=True)
class Sampler:
    """A request's sampling parameters, as S-LoRA normalises them.

    Attributes:
        top_k: number of likeliest words to draw from; 0: all.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, **said: float) -> "Sampler":
        """Convert the wire's values, where 0 for temperature or top_p means not set, and so 1."""
        return cls(
            said["presence_penalty"],
            said["frequency_penalty"],
            said["temperature"] or 1.0,
            said["top_p"] or 1.0,
            int(said["top_k"]),
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest word is always taken."""
        return self.top_k == 1


GREEDY = Sampler(top_k=1)


class Sampled(Protocol):
    """The words of one sequence in logits mode.

    Attributes:
        length_seed: seed for the length model.
    """

    length_seed: int

    def tokens(self, first: int, last: int) -> NDArray[np.uint32]:
        """Return the words at output positions `first` to `last - 1`."""
        ...


UNKNOWN_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID, FIRST_WORD_ID = 0, 1, 2, 3
NUM_WORDS = 1905

TokenIds = NDArray[np.uint32]
Seeds = NDArray[np.uint64]

_U64 = (1 << 64) - 1
TOKEN_STATE_STEP = STEP
# Constants of splitmix64 as in `vocabulary.outputs`, for arrays.
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(shift) for shift in (27, 30, 31, 32))
_WORDS = np.uint64(NUM_WORDS)
_LENGTH_POSITION = -2
"""Position in a sequence's random stream from which its length is drawn; its tokens use positions from 0 on."""
_SCAN_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        seed: the request's, 0 to 2^64 - 1.
        max_new_tokens: limit on output tokens, at least 1.
        sampler: how words are drawn in logits mode.
        output_token_ids: the whole output, in its own vocabulary; empty: the model's own.
        min_new_tokens: output tokens before EOS or a stop sequence may end it; 0: no minimum.
        ignore_eos: run on to `max_new_tokens` or a stop sequence.
        true_output_tokens: a trace's output length, EOS included; None: drawn from the length model.
        stop_sequences: token ids; the sequence ends with the token that completes one.
    """

    seed: int
    max_new_tokens: int
    ignore_eos: bool = False
    true_output_tokens: int | None = None
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    sampler: Sampler = GREEDY
    output_token_ids: tuple[int, ...] = ()


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Ending:
    """Where a sequence ends.

    Attributes:
        output_tokens: its total number of tokens, those produced before a resumption included.
        reason: finish reason.
        extra_step: whether it ends one step after its last token, in a step without a token; not with EOS, which is
            a token.
    """

    output_tokens: int
    reason: FinishReason
    extra_step: bool

    def __init__(self, output_tokens: int, reason: FinishReason, extra_step: bool = False) -> None:
        self.output_tokens = output_tokens
        self.reason = reason
        self.extra_step = extra_step


class LengthModel(Protocol):
    """Where the model ends a sequence by itself."""

    def draw(self, seed: int, prompt_tokens: int) -> Ending:
        """Return the natural end; equal arguments give equal ends."""
        ...


@dataclass(frozen=True, slots=True)
class LognormalLength:
    """EOS after a lognormal number of tokens, at least 1: `median * exp(sigma * z)`, z from the seed."""

    median: float
    sigma: float

    def draw(self, seed: int, prompt_tokens: int) -> Ending:
        """Return the natural end."""
        del prompt_tokens
        uniform = ((hash64(seed, _LENGTH_POSITION) >> 11) + 0.5) / (1 << 53)
        tokens = round(self.median * exp(self.sigma * NormalDist().inv_cdf(uniform)))
        return Ending(max(1, tokens), FinishReason.EOS)


@dataclass(frozen=True, slots=True)
class LlmMockLength:
    """llm-mock's length: 50 tokens plus a fifth of the prompt (100 at most), then a step that only reports "length"."""

    def draw(self, seed: int, prompt_tokens: int) -> Ending:
        """Return the natural end."""
        del seed
        return Ending(50 + min(prompt_tokens, 500) // 5, FinishReason.LENGTH, extra_step=True)


def sequence_seed(model: str, adapter_id: str, seed: int) -> int:
    """Return the 64-bit seed of a sequence's tokens: the request's seed with model and adapter folded in."""
    digest = hashlib.blake2b(f"{len(model)} {model} {adapter_id}".encode(), digest_size=8).digest()
    return hash64(seed & _U64, int.from_bytes(digest, "little"))


def token_ids(seeds: Seeds, positions: NDArray[np.int64]) -> TokenIds:
    """Return one word per sequence, uniform over the words and never EOS.

    Args:
        seeds: from `sequence_seed`.
        positions: output positions from 0; broadcast against `seeds`.
    """
    state = seeds + (positions + 1).astype(np.uint64) * np.uint64(TOKEN_STATE_STEP)
    return finish_token_ids(state)


def token_state(seed: int, position: int) -> int:
    """Return the 64-bit state behind one token; the next position's is `TOKEN_STATE_STEP` more (modulo 2^64)."""
    return (seed + (position + 1) * TOKEN_STATE_STEP) & _U64


def finish_token_ids(state: Seeds) -> TokenIds:
    """Return the words of token states, as `token_ids` does for seeds and positions."""
    z = (state ^ (state >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    z ^= z >> _S31
    words = ((z >> _S32) * _WORDS) >> _S32
    return words.astype(np.uint32) + np.uint32(FIRST_WORD_ID)


def ending(
    seed: int,
    sampling: Sampling,
    prompt_tokens: int,
    produced: TokenIds,
    length_model: LengthModel,
    given: TokenIds | None = None,
    sampled: Sampled | None = None,
    spelling: TokenIds | None = None,
) -> Ending:
    """Return where and why a sequence ends.

    Of several reasons the earliest position decides; at one position stop precedes EOS, which precedes length (S-LoRA's
    order). `max_new_tokens` and `min_new_tokens` count from the start of the output, not from a resumption. An EOS
    within the first `min_new_tokens` is moved right after them, as in vLLM, which masks it in the sampler until then. A
    stop sequence may begin among the produced tokens; the EOS token is not part of any. The search for stop sequences
    costs some ten nanoseconds a position, up to two hundred within a partial match, and ends with the first match.

    Args:
        seed: from `sequence_seed`.
        sampling: the request's.
        prompt_tokens: length of the prompt proper.
        produced: output tokens made before a resumption.
        length_model: used if neither a true length nor `ignore_eos` is given.
        given: token ids of an output that is given: the natural end is theirs, and a true length is ignored.
        sampled: the words in logits mode; a search for stop sequences then makes all of them.
        spelling: of each token in the vocabulary of stop sequences and `produced`; None: as here.

    Raises:
        ValueError: `max_new_tokens` is less than 1.
    """
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
    end = Ending(sampling.max_new_tokens, FinishReason.LENGTH)
    if not sampling.ignore_eos:
        if given is not None:
            natural = Ending(len(given), FinishReason.EOS)
        elif sampling.true_output_tokens is not None:
            natural = Ending(max(1, sampling.true_output_tokens), FinishReason.EOS)
        else:
            natural = length_model.draw(seed if sampled is None else sampled.length_seed, prompt_tokens)
        if natural.output_tokens <= sampling.min_new_tokens:
            has_token = natural.reason is FinishReason.EOS and given is None
            natural = Ending(sampling.min_new_tokens + has_token, natural.reason, natural.extra_step)
        if natural.output_tokens < end.output_tokens or (
            natural.output_tokens == end.output_tokens and not natural.extra_step
        ):
            end = natural
    if sampling.stop_sequences:
        stop = _first_stop(seed, sampling, produced, end, given, sampled, spelling)
        if stop is not None:
            return Ending(stop, FinishReason.STOP)
    return end


def tokens_between(
    seed: int,
    first: int,
    last: int,
    end: Ending,
    given: TokenIds | None = None,
    sampled: Sampled | None = None,
    spelling: TokenIds | None = None,
) -> TokenIds:
    """Return the tokens at output positions `first` to `last - 1` of a sequence that ends at `end`.

    Arguments are as for `ending`; what is given is in the vocabulary of `spelling` already.
    """
    positions = np.arange(first, last, dtype=np.int64)
    if given is not None:
        return given[positions % len(given)]
    tokens = token_ids(np.array([seed], np.uint64), positions) if sampled is None else sampled.tokens(first, last)
    if end.reason is FinishReason.EOS and first < end.output_tokens <= last:
        tokens[end.output_tokens - 1 - first] = EOS_TOKEN_ID
    return tokens if spelling is None else spelling[tokens]


def _first_stop(
    seed: int,
    sampling: Sampling,
    produced: TokenIds,
    end: Ending,
    given: TokenIds | None,
    sampled: Sampled | None,
    spelling: TokenIds | None,
) -> int | None:
    """Return the output length at which a stop sequence is first complete, if that is before its end."""
    possible = _possible(sampling.stop_sequences, produced, given, spelling)
    if not possible:
        return None
    automaton = StopAutomaton(possible)
    firsts = np.array(sorted(automaton.first_symbols), np.uint32)
    first = len(produced)
    overlap = min(max(len(stop) for stop in possible) - 1, first)
    state = START
    for token_id in produced[first - overlap :].tolist():
        state = automaton.step(state, token_id)
    num_words = end.output_tokens - (end.reason is FinishReason.EOS and given is None)
    while first < num_words:
        last = min(first + _SCAN_POSITIONS, num_words)
        tokens = tokens_between(seed, first, last, end, given, sampled, spelling)
        state, index = _scan(automaton, state, tokens, firsts, sampling.min_new_tokens - first)
        if index is not None:
            return first + index + 1
        first = last
    return None


def _possible(
    stop_sequences: tuple[tuple[int, ...], ...],
    produced: TokenIds,
    given: TokenIds | None,
    spelling: TokenIds | None,
) -> list[tuple[int, ...]]:
    """Return the stop sequences that the output can contain: an automaton of the others would cost more."""
    earlier = set(produced.tolist())
    if given is not None:
        earlier.update(given.tolist())
        return [stop for stop in stop_sequences if earlier.issuperset(stop)]
    words: Container[int] = range(FIRST_WORD_ID, FIRST_WORD_ID + NUM_WORDS)
    if spelling is not None:
        words = set(spelling[FIRST_WORD_ID:].tolist())
    return [stop for stop in stop_sequences if all(token in words or token in earlier for token in stop)]


def _scan(
    automaton: StopAutomaton, state: int, tokens: TokenIds, firsts: TokenIds, least: int
) -> tuple[int, int | None]:
    """Read tokens up to the first match, skipping those that cannot begin one; return the state and the match's index.

    A match that is complete before index `least` does not count.
    """
    token_ids = tokens.tolist()
    beginnings = iter(np.flatnonzero(np.isin(tokens, firsts)).tolist())
    position = 0
    while position < len(token_ids):
        if state == START:
            beginning = next((index for index in beginnings if index >= position), None)
            if beginning is None:
                break
            position = beginning
        state = automaton.step(state, token_ids[position])
        if automaton.matched[state] and position >= least:
            return state, position
        position += 1
    return state, None
