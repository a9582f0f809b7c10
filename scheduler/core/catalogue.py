"""The names that settings use for what the core can do, and what builds each."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.batching.base import Batching
from scheduler.core.batching.continuous import Continuous
from scheduler.core.batching.slora_loop import SloraLoop
from scheduler.core.placement import Placement, least_loaded_with_affinity
from scheduler.core.prefix_cache.base import PrefixCache, usable_tokens
from scheduler.core.queues.fcfs import Fcfs
from scheduler.core.queues.req_queue import ReqQueue
from scheduler.core.replica import Replica
from scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Limits of one replica. Names as in S-LoRA and vLLM."""

    max_total_token_num: int
    max_req_total_len: int
    running_max_req_size: int = 1000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    batch_max_tokens: int | None = None
    prefetch: bool = False
    strict: bool = False

    @property
    def effective_batch_max_tokens(self) -> int:
        """`batch_max_tokens`, or S-LoRA's default for it: max(max_total_token_num // 6, max_req_total_len)."""
        if self.batch_max_tokens is not None:
            return self.batch_max_tokens
        return max(self.max_total_token_num // 6, self.max_req_total_len)


CachedTokens = Callable[[Sequence], int]
"""How many leading tokens of a sequence need no computation."""


def _req_queue(limits: ReplicaLimits, cached_tokens: CachedTokens) -> Batching:
    del cached_tokens  # a hit shortens computation only; S-LoRA's limits count the whole prompt
    queue = ReqQueue(
        limits.max_total_token_num,
        limits.effective_batch_max_tokens,
        limits.running_max_req_size,
        strict=limits.strict,
    )
    return SloraLoop(queue, strict=limits.strict, prefetch=limits.prefetch)


def _fcfs(limits: ReplicaLimits, cached_tokens: CachedTokens) -> Batching:
    return Continuous(
        Fcfs(
            limits.max_total_token_num,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            cached_tokens=cached_tokens,
        )
    )


POLICIES: dict[str, Callable[[ReplicaLimits, CachedTokens], Batching]] = {
    "req_queue": _req_queue,
    "fcfs": _fcfs,
}

PLACEMENTS: dict[str, Placement] = {
    "least_loaded": least_loaded_with_affinity,
}


def build_replica(
    policy: str, limits: ReplicaLimits, prefix_cache: PrefixCache | None = None, *, min_computed_tokens: int = 1
) -> Replica:
    """Build a replica by policy name.

    Args:
        policy: a key of POLICIES.
        limits: of this replica.
        prefix_cache: what is computed already; None: nothing.
        min_computed_tokens: prompt tokens computed even if the whole prompt is cached.

    Raises:
        KeyError: no policy of that name.
    """

    def cached_tokens(sequence: Sequence) -> int:
        return usable_tokens(prefix_cache, sequence, min_computed_tokens)

    return Replica(
        POLICIES[policy](limits, cached_tokens),
        prefix_cache=prefix_cache,
        strict=limits.strict,
        min_computed_tokens=min_computed_tokens,
    )
