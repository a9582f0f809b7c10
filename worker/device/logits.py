"""Synthetic logits, and S-LoRA's sampler over them: an output in which the sampling parameters show.

The model. Word i of a sequence has at output position t the logit

    2.5 likes(i) + 1.7 surprise(i, t)

with `likes` and `surprise` standard normal: what the context (base model, adapter, prompt) is about, and what comes up
at one place. Both follow from a hash of the context, never from the request's seed, so greedy decoding says the same
whatever the seed. Their sum has a deviation of 3: of 1,905 words some twenty are likely at temperature 1, and those
that a context likes come again.

The sampler, in S-LoRA's order (slora/server/router/model_infer/post_process.py at c1ddf48):

1. a word that the output has had n > 0 times loses n frequency_penalty + presence_penalty;
2. the logits are divided by the temperature, and a softmax makes them probabilities;
3. from the likeliest down, a word is kept if those before it have at most top_p together, and if they are fewer
   than top_k;
4. one of the kept is drawn by its share. With top_k 1, which is how greedy decoding is spelt, it is the likeliest.

A draw is a function of the seed and the position, so a resumption goes on as the sequence would have, and needs the
earlier output only to count its words. The end-of-sequence token has no logit: where it falls is the length model's.
Cost: about 0.1 ms a token, 10 us where it is greedy.
"""

import hashlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lorrery.worker.device.output import FIRST_WORD_ID, NUM_WORDS, TokenIds, hash64
from lorrery.worker.device.sampler import Sampler

Logits = NDArray[np.float64]

_LIKES, _SURPRISE = 2.5, 1.7
_TABLE_SIZE = 1 << 16
_MAX_PENALTY = 1e9  # the same as infinite, and a sum of them is still a number


def context_of(model: str, adapter_id: str, prompt_token_ids: TokenIds) -> int:
    """Return what a sequence's logits follow from, 64 bits."""
    digest = hashlib.blake2b(f"{len(model)} {model} {adapter_id}\0".encode(), digest_size=8)
    digest.update(prompt_token_ids.tobytes())
    return int.from_bytes(digest.digest(), "little")


def model_logits(context: int, position: int, num_words: int = NUM_WORDS) -> Logits:
    """Return what the model makes of each word at an output position; shape (num_words,)."""
    return _likes(context, num_words) + _SURPRISE * _normals(hash64(context, position), num_words)


def penalised(logits: Logits, counts: NDArray[np.int64], sampler: Sampler) -> Logits:
    """Return the logits with the penalties of the words that `counts` says the output has had."""
    presence = min(sampler.presence_penalty, _MAX_PENALTY)
    frequency = min(sampler.frequency_penalty, _MAX_PENALTY)
    if not presence and not frequency:
        return logits
    return np.where(counts > 0, logits - frequency * counts - presence, logits)


def kept(logits: Logits, sampler: Sampler) -> tuple[NDArray[np.intp], Logits]:
    """Return the words that may be drawn, the likeliest first, and the probability of each before the others went."""
    scaled = logits / sampler.temperature
    shares = np.exp(scaled - scaled.max())
    order = np.argsort(-shares, kind="stable")
    shares = shares[order] / shares.sum()
    num_kept = len(shares) if not sampler.top_k else min(sampler.top_k, len(shares))
    if sampler.top_p < 1:
        before = np.cumsum(shares) - shares
        num_kept = max(1, min(num_kept, int(np.count_nonzero(before <= sampler.top_p))))
    return order[:num_kept], shares[:num_kept]


def draw(logits: Logits, sampler: Sampler, uniform: float) -> int:
    """Return the word that a number in [0, 1) stands for."""
    if sampler.greedy:
        return int(logits.argmax())
    words, shares = kept(logits, sampler)
    sums = np.cumsum(shares)
    return int(words[min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(words) - 1)])


class SampledWords:
    """The words of one sequence, made as far as they have been asked for.

    Args:
        context: from `context_of`.
        seed: of its draws, from `output.sequence_seed`.
        sampler: the request's.
        produced: output tokens made before a resumption.
        num_words: how many words there are to draw from.

    Attributes:
        length_seed: what its length is drawn from; with greedy decoding no part of it is the request's seed.
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


def _likes(context: int, num_words: int) -> Logits:
    """Return what a context likes: the sum of two windows of the table, so that two contexts never have the same."""
    likes = _normals(hash64(context, -1), num_words) + _normals(hash64(context, -3), num_words)
    scaled: Logits = likes * (_LIKES / np.sqrt(2.0))
    return scaled


def _normals(at: int, num_words: int) -> Logits:
    start = at % _TABLE_SIZE
    return _table()[start : start + num_words]


@cache
def _table() -> Logits:
    """Return numbers that are standard normal (Box and Muller), the same wherever this runs."""
    hashes = np.array([hash64(0x10C4, index) for index in range(2 * _TABLE_SIZE)], np.uint64)
    uniform = ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) / (1 << 53)
    normals = np.sqrt(-2 * np.log(uniform[:_TABLE_SIZE])) * np.cos(2 * np.pi * uniform[_TABLE_SIZE:])
    return np.concatenate((normals, normals[:NUM_WORDS]))
