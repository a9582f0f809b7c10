"""The token ids of a prompt: words drawn at random, and equal where a trace says that prefixes are equal.

Ids 0 to 2 are special in the mock tokenizer and the 1,905 single-token words follow, so words are 3 ... 1907. A prompt
is a function of (seed, request), so two runs with one seed send the same bytes. With `hash_ids` each block of 512
tokens is a function of (seed, hash id): requests that share leading ids share that prefix token by token, which is what
a prefix cache must see.
"""

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.mooncake import BLOCK_TOKENS
from lorrery.loadgen.workload.request import WorkloadRequest

__all__ = ["FIRST_WORD_ID", "LAST_WORD_ID", "output_seed", "prompt_token_ids"]

FIRST_WORD_ID = 3
LAST_WORD_ID = 1907

_BY_INDEX, _BY_BLOCK = 0, 1  # keep the two families of streams apart


def prompt_token_ids(request: WorkloadRequest, seed: int) -> npt.NDArray[np.uint32]:
    """Make the prompt; shape (prompt_tokens,).

    Args:
        request: its index, length and hash ids matter.
        seed: of the run, 0 or more.
    """
    if request.hash_ids is None:
        return _words([seed, _BY_INDEX, request.index], request.prompt_tokens)
    blocks = [_words([seed, _BY_BLOCK, block], BLOCK_TOKENS) for block in request.hash_ids]
    return np.concatenate(blocks)[: request.prompt_tokens]


def output_seed(request: WorkloadRequest, seed: int) -> int:
    """Make the seed that a request's output is drawn from; below 2 ** 64."""
    return int(np.random.SeedSequence([seed, 2, request.index]).generate_state(1, np.uint64)[0])


def _words(entropy: list[int], num_tokens: int) -> npt.NDArray[np.uint32]:
    rng = np.random.default_rng(entropy)
    return rng.integers(FIRST_WORD_ID, LAST_WORD_ID, num_tokens, dtype=np.uint32, endpoint=True)
