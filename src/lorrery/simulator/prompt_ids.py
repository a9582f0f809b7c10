"""What prefix caches compare of a simulated request: ids of its parts, in place of their words.

A workload says which parts of prompts are equal: the blocks of a trace by their hash ids; the part that a group shares;
an earlier turn and its answer, which the next turn repeats. All other words are drawn for one request alone. So an id
for each part says as much as its words do, and nobody has to draw them: that took three quarters of a run's time.

Words that are drawn for different requests may be equal by chance, which a comparison of words would find. Where they
are compared in pieces of at least four (`ids_suffice`, `has_ids`), that happens once in 10^13 comparisons.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.prefix_cache.base import of_runs, of_tokens
from lorrery.scheduler.core.sequence import Content

LEAST_WORDS: Final = 4
_ALONE: Final = 1 << 63  # ids of traces are counted from 0, or hashes, none of which is this and a small number

Said = tuple[WorkloadRequest, "array[int]"]
"""An earlier turn of a session, and its output as `output_ids` or as token ids."""


def ids_suffice(prefix_cache: str, block_size: int) -> bool:
    """Return whether matching by ids gives exactly the prefix hits that matching by tokens would.

    Prompts with different ids differ in their tokens wherever a block holds at least four drawn words of the part in
    which they diverge.
    """
    return prefix_cache in ("blocks", "radix") and block_size % LEAST_WORDS == 0


def has_ids(request: WorkloadRequest) -> bool:
    """Return whether ids stand for a request's words: not for given texts, nor if a part ends within four."""
    turn = request.turn
    if turn is None or turn.alone:
        return request.block_tokens % LEAST_WORDS == 0
    return not turn.token_ids and turn.shared_tokens % LEAST_WORDS == 0


def content_by_ids(request: WorkloadRequest, said: Sequence[Said]) -> Content:
    """Return what caches compare of a prompt; `said`: the earlier turns, with their outputs by `output_ids`."""
    turn = request.turn
    if turn is None or turn.alone:
        run_ids = request.hash_ids
        if run_ids is None:
            run_ids = array("Q", [_ALONE | request.index]) * -(-request.prompt_tokens // request.block_tokens)
        return of_runs(run_ids, request.block_tokens, request.prompt_tokens)
    ids = array("I", [_shared_id(turn.shared_group)]) * turn.shared_tokens
    for earlier, output in said:
        ids += _own_ids(earlier)
        ids += output
    ids += _own_ids(request)
    return of_tokens(ids)


def output_ids(request: WorkloadRequest, num_tokens: int) -> "array[int]":
    """Return the ids of a turn's output, of that many tokens."""
    return array("I", [3 * request.index + 2]) * num_tokens


def _own_ids(request: WorkloadRequest) -> "array[int]":
    assert request.turn is not None
    return array("I", [3 * request.index + 1]) * request.turn.own_tokens


def _shared_id(group: int) -> int:
    return 3 * group
