"""S-LoRA's sampler over synthetic logits: an output on which the sampling parameters have an effect.

`vocabulary.outputs` has the model. The sampler, in S-LoRA's order
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

import numpy as np
from numpy.typing import NDArray

from lorrery.vocabulary.outputs import hash64, model_logits
from lorrery.worker.device.output import FIRST_WORD_ID, NUM_WORDS, TokenIds
from lorrery.worker.device.sampler import Sampler

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
