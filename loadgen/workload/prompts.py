"""The token ids of a prompt: random words, equal where a workload has equal prefixes.

Ids 0 to 2 are special in the mock tokenizer and the 1,905 single-token words follow, so words are 3 ... 1907. A prompt
is a function of (seed, request), so two runs with one seed send the same bytes. With `hash_ids` each block is
a function of (seed, hash id): requests that share leading ids share that prefix token by token, as a prefix
cache needs. With a `Turn` the prompt is

    shared part of (seed, group) + for each earlier turn: its own words + its answer + own words of (seed, turn)

so a turn's prompt begins with the whole conversation before it, with answers as received, unless it is `alone`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.request import Turn

FIRST_WORD_ID = 3
LAST_WORD_ID = 1907

TokenIds = npt.NDArray[np.uint32]


class Prompt(Protocol):
    """What a prompt is made from, such as a `WorkloadRequest`."""

    @property
    def index(self) -> int:
        """Place in the workload."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Its length."""
        ...

    @property
    def hash_ids(self) -> Sequence[int] | None:
        """Ids of its blocks."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def turn(self) -> Turn | None:
        """Its parts."""
        ...


_BY_INDEX, _BY_BLOCK, _OF_OUTPUT, _BY_TURN, _BY_GROUP = range(5)  # separate families of streams


def prompt_token_ids(request: Prompt, seed: int, said: Sequence[tuple[Prompt, TokenIds]] = ()) -> TokenIds:
    """Make the prompt; shape (prompt_tokens,), unless answers in `said` differ from their true lengths.

    Args:
        request: its index, length, hash ids and turn matter.
        seed: of the run, 0 or more.
        said: the earlier turns of its session, each with its answer.
    """
    if request.turn is not None and not request.turn.alone:
        before = [part for earlier, answer in said for part in (own_token_ids(earlier, seed), answer)]
        return np.concatenate([shared_token_ids(request.turn, seed), *before, own_token_ids(request, seed)])
    return own_token_ids(request, seed)


def shared_token_ids(turn: Turn, seed: int) -> TokenIds:
    """Make the shared part of a group's prompts; shape (shared_tokens,)."""
    if not turn.shared_tokens:
        return np.empty(0, np.uint32)
    return _words([seed, _BY_GROUP, turn.shared_group], turn.shared_tokens)


def own_token_ids(request: Prompt, seed: int) -> TokenIds:
    """Make the prompt without its shared part and earlier turns: all of it if there are none."""
    turn = request.turn
    if turn is not None and not turn.alone:
        if turn.token_ids:
            return np.array(turn.token_ids, np.uint32)
        return _words([seed, _BY_TURN, turn.session, turn.number], turn.own_tokens)
    if request.hash_ids is None:
        return _words([seed, _BY_INDEX, request.index], request.prompt_tokens)
    blocks = [_words([seed, _BY_BLOCK, block], request.block_tokens) for block in request.hash_ids]
    return np.concatenate(blocks)[: request.prompt_tokens]


def output_seed(request: Prompt, seed: int) -> int:
    """Return the seed of a request's output; below 2 ** 64."""
    return int(np.random.SeedSequence([seed, _OF_OUTPUT, request.index]).generate_state(1, np.uint64)[0])


def _words(entropy: list[int], num_tokens: int) -> TokenIds:
    rng = np.random.default_rng(entropy)
    return rng.integers(FIRST_WORD_ID, LAST_WORD_ID, num_tokens, dtype=np.uint32, endpoint=True)
