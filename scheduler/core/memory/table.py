"""Memory rules and prefix caches by the names that settings use: one row each."""

from collections.abc import Callable
from dataclasses import dataclass

from lorrery.scheduler.core.memory.base import Memory, UnlimitedMemory
from lorrery.scheduler.core.memory.estimated import EstimatedMemory
from lorrery.scheduler.core.memory.on_demand import OnDemandMemory
from lorrery.scheduler.core.memory.paged import NoEvictMemory, PagedMemory
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.policies import batch_limits, batching_name, limits_family, policy_of
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.radix import RadixCache
from lorrery.scheduler.core.prefix_cache.scheduled_blocks import ScheduledBlockCache
from lorrery.scheduler.core.replica_settings import Exclusion, NotIn, ReplicaSettings


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """A memory rule: its builder (given the blocks that a prefix cache shares), and its exclusions."""

    build: Callable[[ReplicaSettings, BlockCache | None], Memory]
    excludes: tuple[Exclusion, ...] = ()


_NO_ORIGINAL_MEMORY = Exclusion(
    {"strict": {True}},
    "strict keeps an original's quirks; all of S-LoRA's queues have memory = 'peak'",
)

MEMORIES: dict[str, MemoryRule] = {
    "peak": MemoryRule(
        lambda s, blocks: PeakMemory(
            s.max_total_token_num,
            exact=limits_family(s).exact_memory,
            together=batching_name(s) == "static",
            keep_refused=s.strict and policy_of(s.policy).keeps_refused,
            least_chunk=max(1, s.step_tokens - batch_limits(s).max_sequences + 1)
            if batching_name(s) == "chunked"
            else None,
        )
    ),
    "paged": MemoryRule(
        lambda s, blocks: PagedMemory(
            s.max_total_token_num, block_size=s.block_size, watermark=s.watermark, shared=blocks
        ),
        (
            _NO_ORIGINAL_MEMORY,
            Exclusion(
                {"batching": {"static"}},
                "memory = 'paged' preempts when blocks run out; nobody leaves a batch of batching = 'static' before its"
                " end, so give it memory = 'peak'",
            ),
        ),
    ),
    "no_evict": MemoryRule(
        lambda s, blocks: NoEvictMemory(s.max_total_token_num, block_size=s.block_size, shared=blocks),
        (
            _NO_ORIGINAL_MEMORY,
            Exclusion(
                {"batching": {"static"}},
                "memory = 'no_evict' takes a sequence's blocks back when it ends; a batch of batching = 'static' keeps"
                " them to its own end, so give it memory = 'peak'",
            ),
        ),
    ),
    "estimated": MemoryRule(
        lambda s, blocks: EstimatedMemory(
            s.max_total_token_num,
            page_size=s.block_size,
            shared=blocks if isinstance(blocks, RadixCache) else None,
            rules=s.sglang,
        ),
        (
            Exclusion(
                {"batching": NotIn(frozenset({"sglang"}))},
                "memory = 'estimated' needs the way to batch that retracts: give it batching = 'sglang', or take"
                " memory = 'paged'",
            ),
        ),
    ),
    "on_demand": MemoryRule(
        lambda s, blocks: OnDemandMemory(
            s.max_total_token_num,
            block_size=s.block_size,
            watermark=s.watermark,
            reserve_full_input=s.scheduler_reserve_full_isl,
            shared=blocks,
        ),
        (
            _NO_ORIGINAL_MEMORY,
            Exclusion(
                {"batching": NotIn(frozenset({"vllm"}))},
                "memory = 'on_demand' leaves it to batching = 'vllm' to take blocks and to preempt; for another way to"
                " batch take memory = 'paged'",
            ),
        ),
    ),
    "none": MemoryRule(lambda s, blocks: UnlimitedMemory(), (_NO_ORIGINAL_MEMORY,)),
}


@dataclass(frozen=True, slots=True)
class CacheKind:
    """A prefix cache: the builder of a replica's own; None: no cache, or one that all replicas share."""

    build: Callable[[ReplicaSettings], BlockCache] | None = None


PREFIX_CACHES: dict[str, CacheKind] = {
    "none": CacheKind(),
    "static_trie": CacheKind(),
    "blocks": CacheKind(
        lambda s: (ScheduledBlockCache if s.share_within_plan else BlockCache)(
            s.block_size, min_computed_tokens=s.min_computed_tokens
        )
    ),
    "radix": CacheKind(lambda s: RadixCache(s.block_size, min_computed_tokens=s.min_computed_tokens)),
}
