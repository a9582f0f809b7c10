"""Turns a request into a sequence whose tokens and end are determined.

In logits mode S-LoRA's sampler draws them over synthetic logits: an output on which the sampling parameters have an
effect. `vocabulary.synthetic_logits` has the model. The sampler, in S-LoRA's order
(slora/server/router/model_infer/post_process.py at c1ddf48):

1. a word with n > 0 occurrences in the output loses n frequency_penalty + presence_penalty;
2. the logits are divided by the temperature, and a softmax makes them probabilities;
3. from the likeliest down, a word is kept if those before it have at most top_p together, and if they are fewer
   than top_k;
4. one of the kept is drawn by its share. With top_k 1, which is how greedy decoding is spelt, it is the likeliest.

A draw is a function of the seed and the position, so a resumption continues the same sequence, and needs the earlier
output only to count its words. The end-of-sequence token has no logit: the length model decides where it falls.
Cost: about 0.1 ms a token, 10 us if greedy.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lorrery.vocabulary.outputs import context_of, hash64, model_logits
from lorrery.worker.device.output import (
    EOS_TOKEN_ID,
    FIRST_WORD_ID,
    NUM_WORDS,
    LengthModel,
    Sampler,
    Sampling,
    TokenIds,
    ending,
    sequence_seed,
)
from lorrery.worker.device.rows import DeviceSequence

Logits = NDArray[np.float64]

_MAX_PENALTY = 1e9  # same effect as infinite, and a sum of them is still finite


def penalised(logits: Logits, counts: NDArray[np.int64], sampler: Sampler) -> Logits:
    """Return the logits less the penalties of the words in the output, which `counts` counts."""
    presence = min(sampler.presence_penalty, _MAX_PENALTY)
    frequency = min(sampler.frequency_penalty, _MAX_PENALTY)
    if not presence and not frequency:
        return logits
    return np.where(counts > 0, logits - frequency * counts - presence, logits)


def kept(logits: Logits, sampler: Sampler) -> tuple[NDArray[np.intp], Logits]:
    """Return the words that may be drawn, the likeliest first, and their probabilities among all words."""
    scaled = logits / sampler.temperature
    shares = np.exp(scaled - scaled.max())
    order = np.argsort(-logits)
    shares = shares[order] / shares.sum()
    num_kept = len(shares) if not sampler.top_k else min(sampler.top_k, len(shares))
    if sampler.top_p < 1:
        before = np.cumsum(shares) - shares
        num_kept = max(1, min(num_kept, int(np.count_nonzero(before <= sampler.top_p))))
    return order[:num_kept], shares[:num_kept]


def draw(logits: Logits, sampler: Sampler, uniform: float) -> int:
    """Return the word that corresponds to a number in [0, 1)."""
    if sampler.greedy:
        return int(logits.argmax())
    if not sampler.top_k and sampler.top_p >= 1:  # all are kept, so their order does not matter
        scaled = logits / sampler.temperature
        return _place(np.exp(scaled - scaled.max()), uniform)
    words, shares = kept(logits, sampler)
    return int(words[_place(shares, uniform)])


def _place(shares: Logits, uniform: float) -> int:
    sums = np.cumsum(shares)
    return min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(shares) - 1)


class SampledWords:
    """The words of one sequence, made on demand.

    Args:
        context: from `context_of`.
        seed: of its draws, from `output.sequence_seed`.
        sampler: the request's.
        produced: output tokens made before a resumption.
        num_words: number of words to draw from.

    Attributes:
        length_seed: seed of its length; with greedy decoding independent of the request's seed.
    """

    __slots__ = ("_context", "_counts", "_first", "_sampler", "_seed", "_words", "length_seed")

    def __init__(
        self, context: int, seed: int, sampler: Sampler, produced: TokenIds, num_words: int = NUM_WORDS
    ) -> None:
        self._context, self._seed, self._sampler = context, seed, sampler
        words = produced[(produced >= FIRST_WORD_ID) & (produced < FIRST_WORD_ID + num_words)] - FIRST_WORD_ID
        self._counts: NDArray[np.int64] = np.bincount(words.astype(np.int64), minlength=num_words)
        self._first = len(produced)
        self._words: list[int] = []
        self.length_seed = context if sampler.greedy else seed

    def tokens(self, first: int, last: int) -> TokenIds:
        """Return the tokens at output positions `first` to `last - 1`, none of them before the resumption."""
        while self._first + len(self._words) < last:
            self._words.append(self._next(self._first + len(self._words)))
        return np.array(self._words[first - self._first : last - self._first], np.uint32) + np.uint32(FIRST_WORD_ID)

    def _next(self, position: int) -> int:
        logits = penalised(model_logits(self._context, position, len(self._counts)), self._counts, self._sampler)
        uniform = (hash64(self._seed, position) >> 11) / (1 << 53)
        word = draw(logits, self._sampler, uniform)
        self._counts[word] += 1
        return word


Mode = Literal["random", "echo", "logits"]


class Words:
    """The mock model's tokens in the terms of another vocabulary.

    Args:
        word_ids: ids of that vocabulary, each once; if there are fewer than words, several words share one.
        eos_id: its end-of-sequence id.

    Attributes:
        table: shape (3 + NUM_WORDS,), the other vocabulary's id of each of our tokens.
        num_distinct: number of distinct word ids in it.
    """

    def __init__(self, word_ids: TokenIds, eos_id: int) -> None:
        self.num_distinct = min(len(word_ids), NUM_WORDS)
        self.table: TokenIds = np.full(FIRST_WORD_ID + NUM_WORDS, eos_id, np.uint32)
        self.table[FIRST_WORD_ID:] = np.resize(word_ids[:NUM_WORDS], NUM_WORDS)
        distinct = self.table[FIRST_WORD_ID : FIRST_WORD_ID + self.num_distinct]
        self._order = np.argsort(distinct, kind="stable")
        self._sorted = distinct[self._order]

    def ours(self, token_ids: TokenIds) -> TokenIds:
        """Convert tokens of the other vocabulary to ours; one that is none of our words becomes end-of-sequence."""
        places = np.minimum(np.searchsorted(self._sorted, token_ids), self.num_distinct - 1)
        words = (self._order[places] + FIRST_WORD_ID).astype(np.uint32)
        ours: TokenIds = np.where(self._sorted[places] == token_ids, words, np.uint32(EOS_TOKEN_ID))
        return ours


@dataclass(frozen=True, slots=True)
class Answers:
    """Gives each request a sequence whose tokens and end are determined.

    Attributes:
        model: the base model's name.
        length_model: draws where EOS falls.
        mode: content of an output that the request does not give: uniformly drawn words, the prompt, or words drawn
            from synthetic logits.
        words: vocabulary of the output; None: the mock model's own.
    """

    model: str
    length_model: LengthModel
    mode: Mode = "random"
    words: Words | None = None

    @property
    def needs_prompts(self) -> bool:
        """Whether an answer depends on the prompt's tokens."""
        return self.mode != "random"

    @property
    def table(self) -> TokenIds | None:
        """Value of `spelling` for `MockGpu`."""
        return None if self.words is None or self.mode == "echo" else self.words.table

    def sequence(
        self,
        handle: int,
        prompt_tokens: int,
        prompt_token_ids: TokenIds,
        produced: TokenIds,
        sampling: Sampling,
        adapter_id: str = "",
        adapter_key: str = "",
        adapter_rank: int = 0,
    ) -> DeviceSequence:
        """Return a sequence as it joins a batch.

        Args:
            handle: its name.
            prompt_tokens: length of the prompt proper.
            prompt_token_ids: shape (prompt_tokens,), or empty where `needs_prompts` is false.
            produced: output tokens made before a resumption, in the vocabulary of the output.
            sampling: the request's.
            adapter_id: of its adapter; empty: the base model.
            adapter_key: name and version of the adapter.
            adapter_rank: of the adapter.

        Raises:
            ValueError: an impossible sequence.
        """
        if self.needs_prompts and len(prompt_token_ids) != prompt_tokens:
            raise ValueError(f"sequence {handle}: {len(prompt_token_ids)} prompt token ids of {prompt_tokens}")
        seed = sequence_seed(self.model, adapter_id, sampling.seed)
        given = prompt_token_ids if self.mode == "echo" else None
        if sampling.output_token_ids:
            given = np.array(sampling.output_token_ids, np.uint32)
        sampled = None
        if self.mode == "logits" and given is None:
            context = context_of(adapter_id, prompt_token_ids.tobytes())
            ours = produced if self.words is None else self.words.ours(produced)
            num_words = NUM_WORDS if self.words is None else self.words.num_distinct
            sampled = SampledWords(context, seed, sampling.sampler, ours, num_words)
        end = ending(seed, sampling, prompt_tokens, produced, self.length_model, given, sampled, self.table)
        return DeviceSequence(
            handle, prompt_tokens, len(produced), seed, end, given, adapter_key, adapter_rank, sampled
        )
