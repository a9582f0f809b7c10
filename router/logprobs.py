"""Log-probabilities of tokens, as the mock model has them.

Its words are drawn alike often, so each has the logarithm of one in `NUM_WORDS`, and which of them are listed as the
likeliest is a matter of choice: the token itself, then others that follow from seed and position, so that a request
asked for again shows the same. Where an output ends is drawn apart from its words; an end-of-sequence token had no
alternative. What the model never says has `NEVER`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from lorrery.chassis.errors import InvalidRequest
from lorrery.tokenizer.base import EOS_ID, FIRST_WORD_ID, NUM_WORDS

MAX_TOP_LOGPROBS = 20
"""vLLM's default, and the most that OpenAI's chat route takes."""
NEVER = -9999.0
"""In place of minus infinity, which JSON lacks; vLLM's."""
_WORD = -log(NUM_WORDS)
_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was.

    Attributes:
        token_id: which it is.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens there, each with its own, the likeliest first.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]


def logprobs_at(seed: int, position: int, token_id: int, num_top: int) -> TokenLogprobs:
    """Return how likely a token was.

    Args:
        seed: of its request.
        position: in the output, from 0; tokens of the prompt have negative ones.
        token_id: the token.
        num_top: how many of the likeliest tokens to list.
    """
    is_word = FIRST_WORD_ID <= token_id < FIRST_WORD_ID + NUM_WORDS
    logprob = _WORD if is_word else 0.0 if token_id == EOS_ID and position >= 0 else NEVER
    certain = logprob > _WORD
    top = [(token_id, logprob)] if num_top and logprob > NEVER else []
    word = (seed + (position + 1) * _STRIDE) >> 16
    while len(top) < num_top:
        other = FIRST_WORD_ID + word % NUM_WORDS
        word += 1
        if other != token_id:
            top.append((other, NEVER if certain else _WORD))
    return TokenLogprobs(token_id, logprob, top)


def check_top_logprobs(num_top: int) -> None:
    """Check how many alternatives a request asks for.

    Raises:
        InvalidRequest: more than `MAX_TOP_LOGPROBS`.
    """
    if num_top > MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {num_top}; a token has at most {MAX_TOP_LOGPROBS} alternatives; ask for fewer",
            field="top_logprobs",
            value=num_top,
            limit=MAX_TOP_LOGPROBS,
        )
