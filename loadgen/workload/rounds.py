"""Requests beyond the workload itself: a warm-up before it, and its repetition."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, cycle, islice

from lorrery.loadgen.workload.request import WorkloadRequest

WARMUP_CONCURRENCY = 4
"""Clients that send the warm-up."""
_WARMUP_OUTPUT_TOKENS = 16
WARMUP_FIRST_INDEX = 2**32  # beyond any workload's


def warmup_requests(workload: Sequence[WorkloadRequest], num_requests: int) -> list[WorkloadRequest]:
    """Return short copies of a workload's first requests, with prompts that the workload does not contain.

    Otherwise the run would find them in a prefix cache. A workload with fewer requests is repeated.
    """
    return [
        replace(
            request,
            index=WARMUP_FIRST_INDEX + index,
            output_tokens=min(request.output_tokens, _WARMUP_OUTPUT_TOKENS),
            hash_ids=None,
            turn=None,
        )
        for index, request in enumerate(islice(cycle(workload), num_requests))
    ]


def again_and_again(workload: Sequence[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Repeat a workload endlessly, with new indices and sessions and so new prompts in each round."""
    num_sessions = 1 + max((one.turn.session for one in workload if one.turn is not None), default=0)
    for position in count():
        number, row = divmod(position, len(workload))
        turn = workload[row].turn
        if turn is not None:
            turn = replace(turn, session=turn.session + number * num_sessions)
        yield replace(workload[row], index=position, turn=turn)
