"""Synthetic prompts in place of ShareGPT's, which cannot be shipped: only lengths and shared openings matter here.

* Length: lognormal, median 100 tokens and sigma 1.3, drawn again unless within 4 ... 1,024 (the bounds of the
  benchmark). Mean 167, p90 430, p99 890; the vLLM paper (SOSP 2023, figure 11) gives ShareGPT's prompts a mean of 161.
* Shared openings: each of the first 8 tokens follows Zipf's law with exponent 1.2 over 1,905 words, independently; the
  others are uniform. So some openings are common ("Write a ..."), and nothing is shared after them. The exponent is
  chosen so that llm-mock's cache finds about as many tokens as its chart shows (1.3, 1.4 and 1.6 of a prompt at 500,
  1,000 and 5,000 entries; the chart has 1.47, 1.47 and 1.66).

A system prompt shared by all prompts can be prepended, which ShareGPT does not have.
"""

import numpy as np

from lorrery.loadgen.workload.prompts import FIRST_WORD_ID, LAST_WORD_ID

MEDIAN_TOKENS, SIGMA = 100.0, 1.3
MIN_TOKENS, MAX_TOKENS = 4, 1_024
OPENING_TOKENS, ZIPF_EXPONENT = 8, 1.2
_NUM_WORDS = LAST_WORD_ID - FIRST_WORD_ID + 1
_WEIGHTS = 1.0 / np.arange(1, _NUM_WORDS + 1) ** ZIPF_EXPONENT
_CUMULATED = np.cumsum(_WEIGHTS / _WEIGHTS.sum())


def draw_prompts(count: int, rng: np.random.Generator, system_tokens: int = 0) -> list[list[int]]:
    """Draw prompts as token ids.

    Args:
        count: number of prompts.
        rng: of lengths and tokens.
        system_tokens: length of the shared beginning, which does not depend on `rng`; added to the drawn length.
    """
    system = [FIRST_WORD_ID + position % _NUM_WORDS for position in range(system_tokens)]
    return [system + _prompt(rng) for _ in range(count)]


def _prompt(rng: np.random.Generator) -> list[int]:
    length = 0
    while not MIN_TOKENS <= length <= MAX_TOKENS:
        length = round(MEDIAN_TOKENS * float(np.exp(SIGMA * rng.standard_normal())))
    num_opening = min(OPENING_TOKENS, length)
    ranks = np.searchsorted(_CUMULATED, rng.random(num_opening))
    opening = np.minimum(ranks, _NUM_WORDS - 1) + FIRST_WORD_ID
    rest = rng.integers(FIRST_WORD_ID, LAST_WORD_ID, length - num_opening, endpoint=True)
    return [*opening.tolist(), *rest.tolist()]
