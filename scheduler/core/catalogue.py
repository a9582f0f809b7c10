"""The names that settings use for what the core can do, and what builds each.

A policy is a queue (who is tried, in which order), a way to batch (what the next step does) and a memory rule (what
fits). To add one, write its file and add a line here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from lorrery.scheduler.core.adapters import AdapterOptions, LoadFails, LoadTime, Residency
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import Batching
from lorrery.scheduler.core.batching.chunked import Chunked
from lorrery.scheduler.core.batching.continuous import Continuous
from lorrery.scheduler.core.batching.llm_mock import LlmMock
from lorrery.scheduler.core.batching.mixed import Mixed
from lorrery.scheduler.core.batching.slora_loop import SloraLoop
from lorrery.scheduler.core.batching.static import Static
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.memory.paged import PagedMemory
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.memory.unlimited import UnlimitedMemory
from lorrery.scheduler.core.placements.adapter_hash import AdapterHash
from lorrery.scheduler.core.placements.base import Placement
from lorrery.scheduler.core.placements.least_loaded import LeastLoaded
from lorrery.scheduler.core.placements.power_of_two import PowerOfTwo
from lorrery.scheduler.core.placements.prefix_match import PrefixMatch
from lorrery.scheduler.core.placements.round_robin import RoundRobin
from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.queues.base import Queue
from lorrery.scheduler.core.queues.cluster import Cluster
from lorrery.scheduler.core.queues.early_drop import FIRST_TOKEN_SLO_PS, EarlyDrop
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.queues.peft import Peft
from lorrery.scheduler.core.queues.pets import Pets
from lorrery.scheduler.core.queues.profile import MeasuredProfile, Profile
from lorrery.scheduler.core.queues.vtc_fair import VtcFair
from lorrery.scheduler.core.replica import Replica, ReplicaOptions
from lorrery.vocabulary.units import NEVER


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What a replica is built from. Names as in S-LoRA and vLLM."""

    policy: str
    max_total_token_num: int
    max_req_total_len: int
    batching: str | None = None
    memory: str = "peak"
    block_size: int = 16
    watermark: float = 0.01
    cache_blocks: bool = False
    share_within_plan: bool = False
    strict: bool = False
    running_max_req_size: int = 1000
    batch_max_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefetch: bool = False
    min_computed_tokens: int = 1
    fair_weights: Mapping[str, Fraction] = field(default_factory=dict)
    batch_num_adapters: int = 1
    first_token_slo_ps: int = FIRST_TOKEN_SLO_PS
    profile: Profile | None = None
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_concurrent_loads: int = 4
    blocking_loads: bool = False

    @property
    def adapter_options(self) -> AdapterOptions:
        """Rules of adapter residency; strict: S-LoRA's."""
        if self.strict:
            return AdapterOptions(max_concurrent_loads=1, blocking=True, keep_unused=False)
        return AdapterOptions(
            max_loras=self.max_loras,
            max_cpu_loras=self.max_cpu_loras,
            max_concurrent_loads=self.max_concurrent_loads,
            blocking=self.blocking_loads,
        )

    @property
    def slora_limits(self) -> BatchLimits:
        """S-LoRA's limits of a new batch; `batch_max_tokens` defaults to max(pool // 6, max_req_total_len)."""
        most = self.batch_max_tokens
        if most is None:
            most = max(self.max_total_token_num // 6, self.max_req_total_len)
        return BatchLimits(self.running_max_req_size, most)

    @property
    def vllm_limits(self) -> BatchLimits:
        """VLLM's limits of a step."""
        return BatchLimits(self.max_num_seqs, self.max_num_batched_tokens, cached_count=False)

    @property
    def limits(self) -> BatchLimits:
        """The limits that go with the queue."""
        return self.vllm_limits if self.policy in VLLM_POLICIES else self.slora_limits

    @property
    def batching_name(self) -> str:
        """The way to batch: as set, or the one the policy's original has."""
        if self.batching is not None:
            return self.batching
        return "continuous" if self.policy in VLLM_POLICIES else "slora_loop"


QUEUES: dict[str, Callable[[ReplicaSettings], Queue]] = {
    "req_queue": lambda settings: Fifo(strict=settings.strict),
    "fcfs": lambda settings: Fifo(),
    "vtc_fair": lambda s: VtcFair(s.fair_weights, strict=s.strict),
    "abort": lambda s: EarlyDrop(s.first_token_slo_ps, strict=s.strict),
    "cluster": lambda s: Cluster(s.batch_num_adapters, strict=s.strict),
    "peft": lambda s: Peft(strict=s.strict),
    "pets": lambda s: Pets(_profile(s), strict=s.strict),
}

VLLM_POLICIES = frozenset({"fcfs"})
"""Queues that come with vLLM's limits, the others with S-LoRA's."""

BATCHINGS: dict[str, Callable[[ReplicaSettings], Batching]] = {
    "slora_loop": lambda s: SloraLoop(s.limits, strict=s.strict, prefetch=s.prefetch),
    "continuous": lambda s: Continuous(s.limits),
    "mixed": lambda s: Mixed(s.limits),
    "chunked": lambda s: Chunked(BatchLimits(s.limits.max_sequences, s.max_num_batched_tokens, cached_count=False)),
    "static": lambda s: Static(s.limits),
    "llm_mock": lambda s: LlmMock(BatchLimits(s.limits.max_sequences, NEVER)),
}

MEMORIES: dict[str, Callable[[ReplicaSettings, BlockCache | None], Memory]] = {
    "peak": lambda s, blocks: PeakMemory(
        s.max_total_token_num,
        exact=s.policy in VLLM_POLICIES,
        together=s.batching_name == "static",
        keep_refused=s.strict and s.policy == "cluster",
    ),
    "paged": lambda s, blocks: PagedMemory(
        s.max_total_token_num, block_size=s.block_size, watermark=s.watermark, shared=blocks
    ),
    "none": lambda s, blocks: UnlimitedMemory(),
}

PLACEMENTS: dict[str, Callable[[np.random.Generator], Placement]] = {
    "least_loaded": lambda rng: LeastLoaded(),
    "round_robin": lambda rng: RoundRobin(),
    "adapter_hash": lambda rng: AdapterHash(),
    "prefix_match": lambda rng: PrefixMatch(),
    "power_of_two": PowerOfTwo,
}


def _profile(settings: ReplicaSettings) -> Profile:
    profile = settings.profile
    if profile is None:
        raise ValueError("the policy pets needs a profile of the device")
    if not settings.strict:
        return profile
    return MeasuredProfile(lambda num, tokens, rank: profile.prefill(num, tokens) + profile.adapter(rank, num, tokens))


def build_replica(
    settings: ReplicaSettings,
    prefix_cache: PrefixCache | None = None,
    *,
    make_queue: Callable[[ReplicaSettings], Queue] | None = None,
    make_batching: Callable[[ReplicaSettings], Batching] | None = None,
    load_ps: LoadTime = lambda adapter, tier: 0,
    load_fails: LoadFails = lambda adapter, attempt, at_ps: False,
) -> Replica:
    """Build a replica.

    Args:
        settings: what of.
        prefix_cache: what is computed already; None: nothing. With `settings.cache_blocks` the replica has its own.
        make_queue: makes a queue that is not in the catalogue, in place of `settings.policy`.
        make_batching: the same for the way to batch.
        load_ps: how long an adapter's load takes.
        load_fails: which loads fail.

    Raises:
        KeyError: no queue, way to batch or memory rule of that name.
        ValueError: the policy needs a profile, and there is none.
    """
    blocks = None
    if settings.cache_blocks:
        prefix_cache = blocks = BlockCache(
            settings.block_size,
            share_within_plan=settings.share_within_plan,
            min_computed_tokens=settings.min_computed_tokens,
        )
    return Replica(
        (make_queue or QUEUES[settings.policy])(settings),
        (make_batching or BATCHINGS[settings.batching_name])(settings),
        MEMORIES[settings.memory](settings, blocks),
        prefix_cache=prefix_cache,
        adapters=Residency(settings.adapter_options, load_ps, load_fails),
        options=ReplicaOptions(strict=settings.strict, min_computed_tokens=settings.min_computed_tokens),
    )
