"""Tables of policies, ways to batch, memory rules and prefix caches by the names that settings use: one row each.

A row has all that other code needs to know. That of a policy has the queue's builder, the family of limits that it runs
under, its default way to batch, what it cannot be combined with, and why. To add a policy, write its file and add its
row here; placements have a table of their own (`placements/table.py`). A test holds settings, docs, fuzz corpus and
benchmarks to the tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.chunked import Chunked, PrefillFirst
from lorrery.scheduler.core.batching.sglang import Sglang
from lorrery.scheduler.core.batching.slora_loop import SloraLoop
from lorrery.scheduler.core.batching.vllm import Vllm
from lorrery.scheduler.core.batching.whole_prompts import Continuous, LlmMock, Mixed, Static
from lorrery.scheduler.core.memory.base import Memory, UnlimitedMemory
from lorrery.scheduler.core.memory.estimated import EstimatedMemory
from lorrery.scheduler.core.memory.on_demand import OnDemandMemory
from lorrery.scheduler.core.memory.paged import NoEvictMemory, PagedMemory
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.radix import RadixCache
from lorrery.scheduler.core.prefix_cache.scheduled_blocks import ScheduledBlockCache
from lorrery.scheduler.core.protocols import Batching, Queue
from lorrery.scheduler.core.queues.early_drop import EarlyDrop
from lorrery.scheduler.core.queues.few_adapters import Cluster, Peft
from lorrery.scheduler.core.queues.fifo import Fifo, Priority
from lorrery.scheduler.core.queues.pets import MeasuredProfile, Pets, Profile
from lorrery.scheduler.core.queues.sglang import LongestPrefix, Rejoining
from lorrery.scheduler.core.queues.vtc_fair import VtcFair
from lorrery.scheduler.core.replica_settings import (
    LIMITS,
    SET,
    Exclusion,
    LimitsFamily,
    NotIn,
    ReplicaSettings,
)
from lorrery.vocabulary.units import NEVER


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy: its queue, and what belongs to it.

    Attributes:
        build: makes the queue; None: the policy comes from outside the tree.
        limits: key of `LIMITS`.
        batching: key of `BATCHINGS`; the way to batch if the settings name none.
        excludes: combinations with other settings that are refused.
        own_settings: settings read only by policies that list them, with the reason given where another has them set.
        needs_profile: whether it needs the device's cost profile.
        keeps_refused: whether in strict mode a refused candidate stays counted for the rest of a pass.
        looks_ahead: whether adapters of the first waiting sequences are loaded ahead: their order is known before the
            batch is formed, and does not change with time.
    """

    build: Callable[[ReplicaSettings], Queue] | None
    limits: str
    batching: str
    excludes: tuple[Exclusion, ...] = ()
    own_settings: Mapping[str, str] = field(default_factory=dict)
    needs_profile: bool = False
    keeps_refused: bool = False
    looks_ahead: bool = False


_LLM_MOCK_IS_IN_ORDER = Exclusion(
    {"batching": {"llm_mock"}},
    "batching = 'llm_mock' is that engine's whole loop, which takes requests in order of arrival: give it policy ="
    " 'fcfs', or take batching = 'mixed'",
)

_IS_OF_SGLANG = (
    Exclusion(
        {"batching": NotIn(frozenset({"sglang"}))},
        "policies fcfs_tail and lpm are SGLang's, whose pass they need: give them batching = 'sglang', or take policy ="
        " 'fcfs'",
    ),
    Exclusion({"strict": {True}}, "strict keeps S-LoRA's quirks; SGLang's policies have none of them"),
)


def _profile(settings: ReplicaSettings) -> Profile:
    profile = settings.profile
    if profile is None:
        raise ValueError("the policy pets needs a profile of the device")
    if not settings.strict:
        return profile
    return MeasuredProfile(lambda num, tokens, rank: profile.prefill(num, tokens) + profile.adapter(rank, num, tokens))


NO_BOUND = frozenset({"vllm", "prefill_first"})
"""Engines' ways to batch in which any number of sequences may overtake one that waits for its adapter."""

QUEUES: dict[str, Policy] = {
    "req_queue": Policy(
        lambda s: Fifo(strict=s.strict), "slora", "slora_loop", (_LLM_MOCK_IS_IN_ORDER,), looks_ahead=True
    ),
    "fcfs": Policy(
        lambda s: Fifo(by_adapter=batching_name(s) in NO_BOUND and s.max_overtakes is None and s.max_loras is not None),
        "vllm",
        "continuous",
        (Exclusion({"strict": {True}}, "strict keeps an original's quirks; fcfs has no original"),),
        looks_ahead=True,
    ),
    "priority": Policy(
        lambda s: Priority(),
        "vllm",
        "continuous",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion({"strict": {True}}, "strict keeps an original's quirks; priority has no original"),
            Exclusion({"prefetch": {True}}, "prefetch is for S-LoRA's policies"),
        ),
        looks_ahead=True,
    ),
    "fcfs_tail": Policy(lambda s: Rejoining(), "vllm", "sglang", _IS_OF_SGLANG),
    "lpm": Policy(lambda s: LongestPrefix(), "vllm", "sglang", _IS_OF_SGLANG),
    "vtc_fair": Policy(
        lambda s: VtcFair(
            s.fair_weights, strict=s.strict, by_tenant=s.fair_by == "tenant", max_running=s.fair_max_running
        ),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"prefetch": {True}, "strict": {True}},
                "S-LoRA's vtc_fair has no look-ahead; leave strict or prefetch",
            ),
            Exclusion(
                {"fair_by": {"tenant"}, "strict": {True}},
                "S-LoRA's vtc_fair is fair between adapters; leave strict or fair_by",
            ),
            Exclusion(
                {"fair_max_running": {SET}, "strict": {True}},
                "S-LoRA's vtc_fair lets any number of one adapter's run; leave strict or fair_max_running",
            ),
        ),
        own_settings={
            "fair_weights": "fair_weights are for policy = 'vtc_fair'",
            "fair_by": "fair_by is for policy = 'vtc_fair'",
            "fair_max_running": "fair_max_running is for policy = 'vtc_fair'",
        },
        looks_ahead=True,
    ),
    "abort": Policy(
        lambda s: EarlyDrop(s.first_token_slo_ps, strict=s.strict),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"prefetch": {True}},
                "whom abort takes next, the newest or the oldest, is only known when it forms the batch",
            ),
        ),
    ),
    "cluster": Policy(
        lambda s: Cluster(s.batch_num_adapters, strict=s.strict),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"batch_num_adapters": {None}},
                "cluster needs batch_num_adapters, the number of adapters that a batch may have",
            ),
        ),
        own_settings={"batch_num_adapters": "batch_num_adapters is for policy = 'cluster'"},
        keeps_refused=True,
        looks_ahead=True,
    ),
    "peft": Policy(
        lambda s: Peft(strict=s.strict),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"prefetch": {True}},
                "peft changes its adapter only when nothing runs, and prefetch loads beside a running batch",
            ),
        ),
    ),
    "pets": Policy(
        lambda s: Pets(_profile(s), strict=s.strict),
        "slora",
        "slora_loop",
        (
            _LLM_MOCK_IS_IN_ORDER,
            Exclusion(
                {"batching": {"chunked", "prefill_first", "vllm"}},
                "pets chooses prompts by the cost of computing them whole and together; batching = 'chunked',"
                " 'prefill_first' and 'vllm' compute them in pieces",
            ),
            Exclusion({"prefetch": {True}}, "whom pets takes next is only known when it forms the batch"),
        ),
        needs_profile=True,
    ),
}

PLUG_IN = Policy(None, "vllm", "continuous")
"""The row of every policy from outside the tree (`module:Class`): it runs as `fcfs` does unless settings differ."""


def policy_of(name: str) -> Policy:
    """Return a policy's row; a name that is not in the table is a plug-in."""
    return QUEUES.get(name, PLUG_IN)


def batching_of(policy: str, chosen: str | None = None) -> str:
    """Return the chosen way to batch, or the policy's default."""
    return policy_of(policy).batching if chosen is None else chosen


def limits_of(policy: str, chosen: str | None = None) -> str:
    """Return the chosen family of limits, or the policy's default."""
    return policy_of(policy).limits if chosen is None else chosen


def batching_name(settings: ReplicaSettings) -> str:
    """Return a replica's way to batch."""
    return batching_of(settings.policy, settings.batching)


def limits_family(settings: ReplicaSettings) -> LimitsFamily:
    """Return the limits family of a replica."""
    return LIMITS[limits_of(settings.policy, settings.limits)]


def batch_limits(settings: ReplicaSettings) -> BatchLimits:
    """Return the limits of an admission pass into an empty batch that computes whole prompts."""
    return limits_family(settings).of(settings)


@dataclass(frozen=True, slots=True)
class WayToBatch:
    """A way to batch.

    Attributes:
        build: makes it; None: it comes from outside the tree.
        prompt_bound: whether a whole prompt must be within the limit of one prefill. A resumed or preempted sequence
            is prefilled again with the output it had, so the limit must allow the longest sequence.
        excludes: combinations with other settings that are refused.
        adapter_slots: whether it gives the adapters of each batch their places (`core.adapters.slots`).
        may_overlap: whether it can do without the last step's result (`core.overlap`).
    """

    build: Callable[[ReplicaSettings], Batching] | None
    prompt_bound: bool = True
    excludes: tuple[Exclusion, ...] = ()
    adapter_slots: bool = False
    may_overlap: bool = False


_DOES_NOT_WAIT = Exclusion(
    {"prefetch": {True}},
    "prefetch uses the steps that batching = 'slora_loop' waits before it tries a new batch; other ways to batch do"
    " not wait",
)

BATCHINGS: dict[str, WayToBatch] = {
    "slora_loop": WayToBatch(lambda s: SloraLoop(batch_limits(s), strict=s.strict, prefetch=s.prefetch)),
    "continuous": WayToBatch(lambda s: Continuous(batch_limits(s)), excludes=(_DOES_NOT_WAIT,)),
    "mixed": WayToBatch(lambda s: Mixed(batch_limits(s)), excludes=(_DOES_NOT_WAIT,)),
    "chunked": WayToBatch(
        lambda s: Chunked(BatchLimits(batch_limits(s).max_sequences, s.step_tokens, cached_count=False)),
        prompt_bound=False,
        excludes=(_DOES_NOT_WAIT,),
    ),
    "prefill_first": WayToBatch(
        lambda s: PrefillFirst(BatchLimits(batch_limits(s).max_sequences, s.step_tokens, cached_count=False)),
        prompt_bound=False,
        excludes=(_DOES_NOT_WAIT,),
    ),
    "sglang": WayToBatch(
        lambda s: Sglang(
            BatchLimits(batch_limits(s).max_sequences, s.step_tokens, cached_count=False),
            s.sglang,
            max_loras=s.max_loras,
        ),
        prompt_bound=False,
        excludes=(
            _DOES_NOT_WAIT,
            Exclusion(
                {"policy": NotIn(frozenset({"fcfs_tail", "lpm"}))},
                "batching = 'sglang' is that engine's whole loop: give it policy = 'fcfs_tail' or 'lpm', or take"
                " batching = 'prefill_first'",
            ),
            Exclusion(
                {"memory": NotIn(frozenset({"estimated"}))},
                "batching = 'sglang' admits by what running requests are thought to need: give it memory = 'estimated'",
            ),
            Exclusion(
                {"prefix_cache_kind": NotIn(frozenset({"none", "radix"}))},
                "batching = 'sglang' has that engine's prefix cache: give it prefix_cache.kind = 'radix' or 'none'",
            ),
        ),
        adapter_slots=True,
        may_overlap=True,
    ),
    "vllm": WayToBatch(
        lambda s: Vllm(
            BatchLimits(
                batch_limits(s).max_sequences,
                s.step_tokens,
                partial=s.enable_chunked_prefill,
                max_active=s.max_num_active_seqs,
            ),
            long_prefill_tokens=s.long_prefill_token_threshold or None,
            adaptive=s.long_prefill_token_threshold_adaptive,
            by_priority=s.policy == "priority",
        ),
        prompt_bound=False,
        excludes=(
            _DOES_NOT_WAIT,
            Exclusion(
                {"memory": NotIn(frozenset({"on_demand"}))},
                "batching = 'vllm' takes the blocks of each step as it schedules it: give it memory = 'on_demand'",
            ),
        ),
    ),
    "static": WayToBatch(lambda s: Static(batch_limits(s)), excludes=(_DOES_NOT_WAIT,)),
    "llm_mock": WayToBatch(
        lambda s: LlmMock(BatchLimits(batch_limits(s).max_sequences, NEVER)),
        prompt_bound=False,
        excludes=(_DOES_NOT_WAIT,),
    ),
}

_PLUG_IN = WayToBatch(None)
"""The row of every way to batch from outside the tree (`module:Class`)."""


def way_of(name: str) -> WayToBatch:
    """Return the row of a way to batch; a name that is not in the table is a plug-in."""
    return BATCHINGS.get(name, _PLUG_IN)


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
