"""Log-probabilities of tokens under the mock model.

Words that are drawn uniformly have the logarithm of 1 / `NUM_WORDS`; the tokens listed as likeliest are then arbitrary:
the token itself, followed by others that depend on seed and position only, so that a resubmitted request shows the
same. Words drawn from synthetic logits have the model's log-probabilities, before penalties and temperature, as in
vLLM. The end of an output is drawn separately from its words, so an end-of-sequence token has no alternative; after a
token that is certain, the first of the vocabulary are listed, as vLLM does where a grammar leaves one token. A token
that the model never produces has `NEVER`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log

import numpy as np
from numpy.typing import NDArray

from lorrery.router.request import Request
from lorrery.tokenizer.base import NUM_WORDS, Tokenizer
from lorrery.vocabulary.outputs import context_of, model_logits

NEVER = -9999.0
"""Replaces minus infinity, which JSON lacks; vLLM's value."""
_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token and of its likeliest alternatives.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability.
        top_token_ids: the likeliest tokens at its position, in descending order.
        top_logprobs: their log-probabilities.
        rank: 1 if no token is more likely; as vLLM counts it, one more for each that is.
    """

    token_id: int
    logprob: float
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]
    rank: int = 1


class LogprobModel:
    """The distribution from which the workers' mock model draws words.

    Args:
        mode: worker.output.mode.
        tokenizer: of the tokens.
    """

    def __init__(self, mode: str, tokenizer: Tokenizer) -> None:
        self._mode = mode
        self._tokenizer = tokenizer

    def of(self, request: Request) -> "OutputLogprobs":
        """Return the log-probabilities of a request's output."""
        context = None
        certain = self._mode == "echo" or bool(request.output_token_ids_u32)
        if self._mode == "logits" and not certain:
            context = context_of(request.adapter_id, request.prompt_token_ids_u32)
        return OutputLogprobs(self.words, request.seed, request.eos_id, context, certain=certain)

    def of_prompt(self, seed: int) -> "OutputLogprobs":
        """Return the log-probabilities of a prompt."""
        return OutputLogprobs(self.words, seed, self._tokenizer.eos_id)

    @cached_property
    def words(self) -> "Words":
        """The words of the output."""
        return Words(self._tokenizer.word_ids)


class Words:
    """The tokens that an output consists of.

    Args:
        ids: see `Tokenizer.word_ids`.

    Attributes:
        ids: as a list.
        index: position of each token in `ids`.
        uniform: log-probability of each word under uniform drawing. In a vocabulary with fewer than `NUM_WORDS` words,
            some stand for more of the model's words than others.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.index = {token_id: index for index, token_id in enumerate(ids)}
        each, more = divmod(NUM_WORDS, len(ids))
        rare, often = (log(max(1, num_words) / NUM_WORDS) for num_words in (each, each + 1))
        self.uniform = [often] * more + [rare] * (len(ids) - more)
        self._twice = self.ids * 2, self.uniform * 2

    def some(self, first: int, num_words: int) -> tuple[list[int], list[float]]:
        """Return up to `num_words` words from index `first`, cyclically, with their `uniform` values."""
        ids, uniform = self._twice
        return ids[first : first + num_words], uniform[first : first + num_words]


class OutputLogprobs:
    """Log-probabilities for one output.

    Args:
        words: the tokens that it consists of.
        seed: of the request.
        eos_id: the token that ends an output.
        context: of synthetic logits; None: words are drawn uniformly.
        certain: whether each token has probability 1, as in an output that is given.
    """

    def __init__(
        self, words: Words, seed: int, eos_id: int, context: int | None = None, *, certain: bool = False
    ) -> None:
        self._words, self._seed, self._eos_id = words, seed, eos_id
        self._context, self._certain = context, certain

    def at(self, position: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Return the log-probability of a token.

        Args:
            position: in the output, from 0; prompt tokens have negative positions.
            token_id: the token.
            num_top: number of likeliest tokens to list.
        """
        index = self._words.index.get(token_id)
        if position >= 0 and (self._certain or token_id == self._eos_id):
            return self._spread(position, token_id, 0.0, num_top)
        if index is None:
            return self._spread(position, token_id, NEVER, num_top)
        if self._context is not None and position >= 0:
            return self._from_logits(position, index, num_top)
        return self._spread(position, token_id, self._words.uniform[index], num_top)

    def _from_logits(self, position: int, index: int, num_top: int) -> TokenLogprobs:
        ids = self._words.ids
        assert self._context is not None
        logits = model_logits(self._context, position, len(ids))
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = likeliest(logprobs, num_top)
        top = [ids[at] for at in best.tolist()]
        rank = 1 + int(np.count_nonzero(logprobs > logprobs[index]))
        return TokenLogprobs(ids[index], float(logprobs[index]), top, logprobs[best].tolist(), rank)

    def _spread(self, position: int, token_id: int, logprob: float, num_top: int) -> TokenLogprobs:
        """Return a token's log-probability with alternatives that depend on seed and position."""
        rank = 1 if logprob > NEVER else NUM_WORDS + 1
        if not num_top:
            return TokenLogprobs(token_id, logprob, (), (), rank)
        if logprob == 0.0:
            others = [other for other in range(num_top) if other != token_id][: num_top - 1]
            return TokenLogprobs(token_id, logprob, [token_id, *others], [logprob, *[NEVER] * len(others)], rank)
        words = self._words
        first = ((self._seed + (position + 1) * _STRIDE) >> 16) % len(words.ids)
        top, logprobs = words.some(first, min(num_top, len(words.ids)))
        if token_id in top:
            at = top.index(token_id)
            del top[at], logprobs[at]
        if logprob > NEVER:
            top.insert(0, token_id)
            logprobs.insert(0, logprob)
        return TokenLogprobs(token_id, logprob, top[:num_top], logprobs[:num_top], rank)


def likeliest(logprobs: NDArray[np.float64], num_top: int) -> NDArray[np.intp]:
    """Return the indices of the highest values in descending order; equal values by index.

    Sorting all of them would take five times as long.
    """
    num_top = min(num_top, len(logprobs))
    high = np.flatnonzero(logprobs >= np.partition(logprobs, -num_top)[-num_top]) if num_top else np.empty(0, np.intp)
    best: NDArray[np.intp] = high[np.argsort(-logprobs[high], kind="stable")][:num_top]
    return best
