"""What is sent beside a workload as it stands: short requests before it, and the same again at its end."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from lorrery.loadgen.workload.request import WorkloadRequest

WARMUP_CONCURRENCY = 4
"""Clients that send the warm-up."""
_WARMUP_OUTPUT_TOKENS = 16
WARMUP_FIRST_INDEX = 2**32  # beyond any workload's


def warmup_requests(workload: Sequence[WorkloadRequest], num_requests: int) -> list[WorkloadRequest]:
    """Return short copies of a workload's first requests, with prompts that nobody else sends.

    Otherwise the run would find them in a prefix cache.
    """
    return [
        replace(
            request,
            index=WARMUP_FIRST_INDEX + request.index,
            output_tokens=min(request.output_tokens, _WARMUP_OUTPUT_TOKENS),
            hash_ids=None,
        )
        for request in workload[:num_requests]
    ]


def again_and_again(workload: Sequence[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Yield a workload without end: it begins again at its end, with new indices and so new prompts."""
    for position in count():
        yield replace(workload[position % len(workload)], index=position)
