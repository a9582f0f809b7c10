"""The settings of a scheduler: how batches are formed, the adapters that requests may name, the prefix cache."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lorrery.chassis.sections import (
    LONGEST_SECONDS,
    MAX_ADAPTERS,
    Address,
    Count,
    CountOrZero,
    Interval,
    LoadLimit,
    Name,
    PathOrNone,
    PositiveSeconds,
    Seconds,
    Section,
    Seed,
    Weight,
    named,
)
from lorrery.scheduler.core.batchings import BATCHINGS
from lorrery.scheduler.core.combinations import why_excluded, why_too_few_tokens
from lorrery.scheduler.core.memories import MEMORIES, PREFIX_CACHES
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import QUEUES, limits_of
from lorrery.scheduler.core.queues.patience import MAX_OVERTAKES
from lorrery.scheduler.core.replica_settings import LIMITS, LOOK_AHEAD

PolicyName = Annotated[str, named(*QUEUES, plug_ins=True)]
BatchingName = Annotated[str, named(*BATCHINGS, plug_ins=True)]
PlacementName = Annotated[str, named(*PLACEMENTS, plug_ins=True)]
MemoryName = Annotated[str, named(*MEMORIES)]
CacheName = Annotated[str, named(*PREFIX_CACHES)]
LimitsName = Annotated[str, named(*LIMITS)]
PlugInOptions = dict[str, Any]
MAX_BLOCK_TOKENS = 65_536
"""Most tokens in a KV block: a replica counts sequences by their position in their last block."""
GbPerSecond = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
ScoreWeight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class PlacementWeights(Section):
    """What each score of `placement = "weighted"` counts; 0: nothing. docs/policies.md says how scores are made."""

    queue: ScoreWeight = Field(default=2.0, description="few waiting requests")
    load: ScoreWeight = Field(default=2.0, description="few requests, waiting and running, beside the mean")
    adapter: ScoreWeight = Field(default=4.0, description="the adapter on the GPU, or soon")
    prefix: ScoreWeight = Field(default=3.0, description="share of the prompt in the worker's prefix cache")

    @model_validator(mode="after")
    def _counts_something(self) -> Self:
        if not any(dict(self).values()):
            raise ValueError("queue, load, adapter and prefix are all 0; give at least one of them more than 0")
        return self


class AdapterSpec(Section):
    """One adapter, or with `count` a family of them: `id-0` ... `id-(count-1)`."""

    id: Name = Field(description="adapter id, as requests name it; a family's ids begin with it")
    rank: Count = Field(description="LoRA rank")
    count: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] | None = Field(
        default=None, description="adapters in the family; unset: one adapter"
    )


class AdapterSettings(Section):
    """The adapters that requests may name."""

    max_lora_rank: Count = Field(default=64, description="largest rank that an adapter may have")
    target_modules: Literal["qkvo", "all-linear"] = Field(
        default="qkvo", description="projections that adapters change; with the rank it gives their size"
    )
    slots_rule: Literal["slora", "exact"] = Field(
        default="slora",
        description="what an adapter takes of the KV pool: 4 x rank tokens, or as many as have its size in bytes",
    )
    max_loras: Count | None = Field(
        default=None,
        description="adapters on a worker's GPU at once; unset: as many as its memory holds beside the weights and the"
        " longest request",
    )
    max_cpu_loras: Count | None = Field(default=None, description="places in a worker's host memory; unset: all")
    max_concurrent_loads: Count = Field(default=4, description="loads that one worker does at once")
    look_ahead: CountOrZero = Field(
        default=LOOK_AHEAD,
        description="waiting requests, those that come next, whose adapters are loaded ahead; not with loading ="
        " 'blocking', strict, and policies that know only when they form a batch who comes next; 0: none",
    )
    max_overtakes: CountOrZero = Field(
        default=MAX_OVERTAKES,
        description="req_queue, fcfs, vtc_fair: most requests that may enter past one that waits for its adapter; then"
        " none until it has; 0: it holds up all behind it",
    )
    loading: Literal["background", "blocking"] = Field(
        default="background", description="who waits for a load: the request in the queue, or the whole prefill step"
    )
    host_gb_per_second: GbPerSecond = Field(
        default=24.0, description="from pinned host memory; 24 over PCIe 4.0, 50 over 5.0"
    )
    disk_gb_per_second: GbPerSecond = Field(default=2.0, description="for an adapter not in host memory yet")
    load_failure_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of loads that fail, drawn by scheduler.seed"
    )
    registry: tuple[AdapterSpec, ...] = Field(
        default=(), description="adapters known from the start; others are loaded through the router"
    )
    max_loaded_adapters: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=4096,
        description="adapters that may be loaded at run time; the next load is refused with RESOURCE_EXHAUSTED",
    )

    @model_validator(mode="after")
    def _unique(self) -> Self:
        singles, families = set[str](), dict[str, int]()
        for spec in self.registry:
            name = spec.id if spec.count is None else f"{spec.id}-0"
            if spec.rank > self.max_lora_rank:
                raise ValueError(f"adapter {name!r} has rank {spec.rank}; max_lora_rank is {self.max_lora_rank}")
            if spec.id in (families if spec.count else singles):
                raise ValueError(f"adapter {name!r} is listed twice")
            if spec.count is None:
                singles.add(spec.id)
            else:
                families[spec.id] = spec.count
        for name in singles:
            if _is_of(name, families):
                raise ValueError(f"adapter {name!r} is listed twice")
        return self

    @property
    def num_adapters(self) -> int:
        """How many are known from the start."""
        return sum([spec.count or 1 for spec in self.registry])

    def listed(self, names: Iterable[str]) -> list[str]:
        """Return those of some names that are adapters, without spelling out families."""
        singles = {spec.id for spec in self.registry if spec.count is None}
        families = {spec.id: spec.count for spec in self.registry if spec.count is not None}
        return [name for name in names if name in singles or _is_of(name, families)]

    def expand(self) -> Iterable[tuple[str, int]]:
        """Yield (adapter id, rank) of every adapter, families spelt out."""
        for spec in self.registry:
            if spec.count is None:
                yield spec.id, spec.rank
            else:
                yield from ((f"{spec.id}-{index}", spec.rank) for index in range(spec.count))


def _is_of(name: str, families: Mapping[str, int]) -> bool:
    """Return whether a name is that of an adapter of a family; `families`: how many adapters each has."""
    family, _, number = name.rpartition("-")
    count = families.get(family)
    if count is None or not number.isascii() or not number.isdigit() or len(number) > len(str(count)):
        return False
    return int(number) < count and str(int(number)) == number


class PrefixCacheSettings(Section):
    """Which prompt prefixes count as already computed."""

    kind: CacheName = Field(
        default="none",
        description="blocks: dynamic, in KV blocks, as vLLM; static_trie: built once from known prompts, as llm-mock",
    )
    corpus: PathOrNone = Field(default=None, description="static_trie: prompts, one JSON array of token ids a line")
    cache_size: CountOrZero = Field(
        default=500, description="static_trie: tokens (edges of the trie) to keep of the corpus"
    )
    trie: PathOrNone = Field(default=None, description="static_trie: a file that `lorrery cache` has built")
    share_within_plan: bool = Field(
        default=False, description="blocks: let a prompt use what another one computes in the same step"
    )

    @model_validator(mode="after")
    def _has_corpus(self) -> Self:
        if self.kind == "static_trie" and (self.corpus is None) == (self.trie is None):
            raise ValueError("kind = 'static_trie' needs corpus, or trie as `lorrery cache` builds it")
        return self


class SchedulerSettings(Section):
    """How batches are formed, and what a scheduler puts up with."""

    listen: Address = Field(
        default="127.0.0.1:50052", description="where routers and workers connect, HOST:PORT; port 0 takes a free one"
    )
    metrics: Address = Field(
        default="127.0.0.1:9102", description="where Prometheus reads metrics, HOST:PORT; port 0 takes a free one"
    )

    policy: PolicyName = Field(
        default="req_queue", description="queue, which orders waiting requests; docs/policies.md says what each is for"
    )
    policy_options: PlugInOptions = Field(
        default={}, description="keyword arguments of a policy of one's own (policy = 'module:Class')"
    )
    batching: BatchingName | None = Field(
        default=None,
        description="way to batch; unset: the one the policy's original has; under a policy of one's own continuous",
    )
    batching_options: PlugInOptions = Field(default={}, description="the same for batching = 'module:Class'")
    limits: LimitsName | None = Field(
        default=None,
        description="slora: running_max_req_size and batch_max_tokens bound a batch; vllm: max_num_seqs and"
        " max_num_batched_tokens, and memory = 'peak' charges exactly; unset: those of the policy's original; under a"
        " policy of one's own vllm",
    )
    strict: bool = Field(default=False, description="keep the published quirks of the policy's original")

    max_total_token_num: Count | None = Field(
        default=None, description="KV pool in tokens; unset: what each worker announces"
    )
    max_req_input_len: Count = Field(default=2048, description="most tokens of a prompt")
    max_req_total_len: Count = Field(default=3072, description="most tokens of a prompt and its output together")
    memory: MemoryName = Field(
        default="peak",
        description="reserve everybody's peak (peak), give out blocks and preempt when they run out (paged), let in who"
        " finds blocks for all it may produce (no_evict), or bound the count only (none)",
    )
    block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_TOKENS)] = Field(
        default=16, description="paged, no_evict, and prefix_cache.kind = 'blocks': tokens in a block"
    )
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.01, description="paged: share of the blocks that admission leaves free"
    )
    # S-LoRA's limits, and what belongs to its policies
    batch_max_tokens: Count | None = Field(
        default=None,
        description="prompt tokens of one prefill; unset: max(max_total_token_num // 6, max_req_total_len)",
    )
    running_max_req_size: Count = Field(
        default=1000, description="S-LoRA's limits: most requests that run at once on a worker"
    )
    prefetch: bool = Field(default=False, description="slora_loop: load the next batch's adapters ahead")
    fair_weights: tuple[Weight, ...] | dict[str, Weight] = Field(
        default=(),
        description="vtc_fair: shares in the order of the registry, or by adapter (by tenant, if that is who it is fair"
        " to); missing ones are 1; an API key's weight goes before",
    )
    fair_by: Literal["adapter", "tenant"] | None = Field(
        default=None, description="vtc_fair: to whom it is fair; unset: to adapters, as S-LoRA"
    )
    fair_max_running: Count | None = Field(
        default=None,
        description="vtc_fair: most requests of one adapter or tenant that run at once on a worker; unset: any number",
    )
    batch_num_adapters: Count | None = Field(default=None, description="cluster: distinct adapters in a batch")
    first_token_slo_seconds: Annotated[float, Field(gt=0.5, le=LONGEST_SECONDS)] = Field(
        default=6.0, description="abort: device seconds; who waits to within half a second of it is dropped"
    )
    # vLLM's limits
    max_num_seqs: Count = Field(default=256, description="vLLM's limits: most requests that run at once on a worker")
    max_num_batched_tokens: Count | None = Field(
        default=None,
        description="vLLM's limits: most tokens that one step computes; unset: 8192, or max_req_total_len where that is"
        " more and prompts are computed whole",
    )

    prefix_cache: PrefixCacheSettings = PrefixCacheSettings()

    placement: PlacementName = Field(
        default="least_loaded", description="which worker a request goes to; docs/policies.md says what each is for"
    )
    placement_options: PlugInOptions = Field(default={}, description="the same for placement = 'module:Class'")
    placement_homes: Count = Field(
        default=2, description="workers that adapter_shards and weighted shard an adapter over, before it needs more"
    )
    placement_draws: Count = Field(
        default=2, description="workers that adapter_shards and weighted draw at random for each request to look at"
    )
    placement_weights: PlacementWeights = PlacementWeights()
    placement_max_load: LoadLimit = Field(
        default=2.0,
        description="weighted passes over a worker with more than so many times the mean load of those it looks at,"
        " whatever its scores; inf: none",
    )
    log_placement: bool = Field(default=False, description="log for each request where it went and why")
    seed: Seed = Field(default=0, description="seed of what the scheduler draws at random")
    journal: PathOrNone = Field(
        default=None, description="JSON Lines file for what comes in and what runs, in device time; unset: none"
    )
    adapters_file: PathOrNone = Field(
        default=None,
        description="file that keeps what was loaded and unloaded at run time; unset: beside the journal, as"
        " JOURNAL.adapters, or none without a journal; then a scheduler learns it from its routers",
    )

    max_waiting_requests: Count = Field(
        default=10_000,
        description="most requests that wait, all workers together; the next is refused with RESOURCE_EXHAUSTED",
    )
    max_waiting_requests_per_tenant: Count | None = Field(
        default=None,
        description="most requests of one tenant that wait, as requests or their keys name it; the next is refused with"
        " RESOURCE_EXHAUSTED; unset: one tenant may fill the queue",
    )
    deadline_admission: bool = Field(
        default=False,
        description="refuse a request at once that is not expected to start before its client's deadline (or"
        " start_within_seconds), and drop one that still waits then, with RESOURCE_EXHAUSTED",
    )
    start_within_seconds: PositiveSeconds | None = Field(
        default=None,
        description="deadline_admission: device seconds after its arrival in which a request must start; unset: only"
        " its client's deadline counts",
    )
    max_pending_router_tokens: Count = Field(
        default=1_000_000,
        description="tokens, of 8 bytes each, that may wait for one slow router, whose stream is then cut off",
    )
    router_timeout_seconds: Interval = Field(
        default=10.0, description="the stream of a router that takes nothing for so long is cut off"
    )
    worker_timeout_seconds: Annotated[float, Field(ge=0.1, le=LONGEST_SECONDS, allow_inf_nan=False)] = Field(
        default=5.0,
        description="a worker is lost that is silent for so long, or has a plan and makes no progress for so long"
        " beyond the end of the step under way",
    )
    worker_wait_seconds: Seconds = Field(
        default=30.0, description="how long a request waits for a worker to attach before it ends with UNAVAILABLE"
    )
    max_worker_losses: Count = Field(
        default=3,
        description="a request ends with INTERNAL once so many workers were lost while they ran it, and is not moved"
        " to another",
    )
    drain_seconds: Seconds = Field(default=30.0, description="after SIGTERM: time for running requests to end")

    @property
    def max_running(self) -> int:
        """Most requests that run at once on a worker."""
        return self.max_num_seqs if self.max_running_setting == "max_num_seqs" else self.running_max_req_size

    @property
    def max_running_setting(self) -> str:
        """The setting that says how many these are."""
        return {"slora": "running_max_req_size", "vllm": "max_num_seqs"}[limits_of(self.policy, self.limits)]

    @property
    def submit_bytes(self) -> int:
        """The largest request that a scheduler takes off a Route stream.

        A prompt with its output so far has max_req_total_len tokens of 4 bytes at most. Twice that, so that what is
        over a limit on lengths is refused for it, and 64 MiB at least, for all else: stop sequences, names, adapters.
        """
        return max(64 * 1024 * 1024, 2 * 4 * self.max_req_total_len)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_req_input_len >= self.max_req_total_len:
            raise ValueError(
                f"max_req_input_len ({self.max_req_input_len}) must be less than"
                f" max_req_total_len ({self.max_req_total_len})"
            )
        if self.max_total_token_num is not None and self.max_total_token_num < self.max_req_total_len:
            raise ValueError(
                f"max_total_token_num ({self.max_total_token_num}) must be at least"
                f" max_req_total_len ({self.max_req_total_len})"
            )
        if self.start_within_seconds is not None and not self.deadline_admission:
            raise ValueError("start_within_seconds needs deadline_admission = true")
        chosen = dict(self)
        why = why_excluded(chosen) or why_too_few_tokens(
            self.policy, self.batching, self.limits, self.max_req_total_len, chosen
        )
        if why is not None:
            raise ValueError(why)
        for part in ("policy", "batching", "placement"):
            name, options = chosen[part], chosen[f"{part}_options"]
            if options and ":" not in (name or ""):
                raise ValueError(f"{part}_options are for a {part} of one's own, module:Class; {part} is {name!r}")
        return self
