"""The settings of a scheduler: how batches are formed, the adapters that requests may name, the prefix cache."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lorrery.scheduler.core.build import why_excluded, why_too_few_tokens
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import BATCHINGS, MEMORIES, PREFIX_CACHES, QUEUES, limits_of
from lorrery.scheduler.core.queues.waiting import MAX_OVERTAKES
from lorrery.scheduler.core.replica_settings import DEFAULT as RULES
from lorrery.scheduler.core.replica_settings import LIMITS, LOOK_AHEAD, MAX_NUM_BATCHED_TOKENS, SglangRules
from lorrery.service.settings.sections import (
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
from lorrery.vocabulary.units import PS_PER_SECOND

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
    """Weights of the scores of `placement = "weighted"`, as docs/policies.md defines them; 0: a score is not used."""

    queue: ScoreWeight = Field(default=2.0, description="few waiting requests")
    load: ScoreWeight = Field(default=2.0, description="few requests, waiting and running, relative to the mean")
    adapter: ScoreWeight = Field(default=4.0, description="how soon the adapter is on the GPU")
    prefix: ScoreWeight = Field(default=3.0, description="share of the prompt in the worker's prefix cache")

    @model_validator(mode="after")
    def _counts_something(self) -> Self:
        if not any(dict(self).values()):
            raise ValueError("queue, load, adapter and prefix are all 0; give at least one of them more than 0")
        return self


class AdapterSpec(Section):
    """One adapter, or with `count` a family of adapters: `id-0` ... `id-(count-1)`."""

    id: Name = Field(description="adapter id, as requests name it; for a family, the prefix of its ids")
    rank: Count = Field(description="LoRA rank")
    count: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] | None = Field(
        default=None, description="number of adapters in the family; unset: one adapter"
    )
    path: str | None = Field(
        default=None, description="folder that it comes from, not read: `root` of its card in /v1/models; unset: its id"
    )

    @model_validator(mode="after")
    def _has_one_path(self) -> Self:
        if self.path is not None and self.count is not None:
            raise ValueError(f"adapter family {self.id!r} has a path; only one adapter may: leave out path, or count")
        return self


class AdapterSettings(Section):
    """The adapters that requests may name."""

    max_lora_rank: Count = Field(default=64, description="maximum rank of an adapter")
    target_modules: Literal["qkvo", "all-linear"] = Field(
        default="qkvo",
        description="projections that adapters modify; together with the rank they determine an adapter's size",
    )
    slots_rule: Literal["slora", "exact", "reserved"] = Field(
        default="slora",
        description="KV pool tokens that an adapter occupies: slora: 4 x rank; exact: as many as match its size in"
        " bytes; reserved: none, since memory for max_loras places of the largest rank is set aside before the pool is"
        " sized",
    )
    enable_lora: bool = Field(
        default=False,
        description="slots_rule = 'reserved': set memory aside even if the registry is empty, for adapters loaded"
        " later",
    )
    max_loras: Count | None = Field(
        default=None,
        description="maximum adapters on a worker's GPU; unset: as many as fit beside the weights and the longest"
        " request",
    )
    max_cpu_loras: Count | Literal["max_loras"] | None = Field(
        default=None,
        description="maximum adapters in a worker's host memory, least recently used out first; max_loras: as many as"
        " on its GPU, as vLLM has it; unset: every adapter read so far",
    )
    keep_unloaded: bool = Field(
        default=False,
        description="whether an unloaded adapter stays in a worker's memory until another one needs its place; else it"
        " leaves with its last request",
    )
    max_concurrent_loads: Count = Field(default=4, description="maximum concurrent adapter loads per worker")
    look_ahead: CountOrZero = Field(
        default=LOOK_AHEAD,
        description="how many requests at the front of the queue have their adapters loaded ahead of admission; no"
        " effect with loading = 'blocking', with strict, or under policies that order requests only when they form a"
        " batch; 0: none",
    )
    max_overtakes: CountOrZero | None = Field(
        default=None,
        description="req_queue, fcfs, priority, vtc_fair: maximum requests admitted ahead of one that waits for its"
        f" adapter; then none until the adapter is loaded; 0: it blocks all requests behind it; unset: {MAX_OVERTAKES},"
        " or no bound with batching = 'vllm' or 'prefill_first'",
    )
    loading: Literal["background", "blocking"] = Field(
        default="background",
        description="what an adapter load delays: background: only the request, which stays in the queue;"
        " blocking: the whole prefill step, unless a fault makes it slow or fail",
    )
    host_gb_per_second: GbPerSecond = Field(
        default=24.0, description="load bandwidth from pinned host memory, GB/s; 24 over PCIe 4.0, 50 over 5.0"
    )
    disk_gb_per_second: GbPerSecond = Field(
        default=2.0, description="load bandwidth from disk, GB/s, for an adapter not yet in host memory"
    )
    load_failure_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of adapter loads that fail, drawn with scheduler.seed"
    )
    registry: tuple[AdapterSpec, ...] = Field(
        default=(), description="adapters known at startup; others are loaded through the router"
    )
    max_loaded_adapters: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=4096,
        description="maximum adapters loaded at run time; further loads are refused with RESOURCE_EXHAUSTED",
    )

    @model_validator(mode="after")
    def _unique(self) -> Self:
        singles, families = set[str](), dict[str, int]()
        for spec in self.registry:
            name = spec.id if spec.count is None else f"{spec.id}-0"
            if spec.rank > self.max_lora_rank:
                raise ValueError(
                    f"adapter {name!r} has rank {spec.rank}; max_lora_rank is {self.max_lora_rank}: raise it, or give"
                    " an adapter of lower rank"
                )
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

    @model_validator(mode="after")
    def _has_places(self) -> Self:
        if self.slots_rule == "reserved" and self.max_loras is None:
            raise ValueError("slots_rule = 'reserved' sets memory aside for max_loras places, which is unset; set it")
        return self

    @property
    def host_places(self) -> int | None:
        """Places for adapters in a worker's host memory; None: enough for all."""
        return self.max_loras if self.max_cpu_loras == "max_loras" else self.max_cpu_loras

    @property
    def are_reserved(self) -> bool:
        """Whether memory is set aside for places."""
        return self.slots_rule == "reserved" and (self.enable_lora or bool(self.registry))

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
    """Which prompt prefixes are treated as already computed."""

    kind: CacheName = Field(
        default="none",
        description="blocks: dynamic, in KV blocks, as in vLLM; static_trie: built once from known prompts, as in"
        " llm-mock; radix: dynamic, in the nodes of SGLang's tree",
    )
    corpus: PathOrNone = Field(
        default=None, description="static_trie: file of prompts, one JSON array of token ids per line"
    )
    cache_size: CountOrZero = Field(
        default=500, description="static_trie: number of corpus tokens (edges of the trie) to keep"
    )
    trie: PathOrNone = Field(default=None, description="static_trie: file written by `lorrery cache`")
    share_within_plan: bool = Field(
        default=False,
        description="blocks: as in vLLM, blocks can be found from the moment they are scheduled, output included, and"
        " equal ones are kept apart",
    )

    @model_validator(mode="after")
    def _has_corpus(self) -> Self:
        if self.kind == "static_trie" and (self.corpus is None) == (self.trie is None):
            raise ValueError("kind = 'static_trie' needs corpus, or trie, a file written by `lorrery cache`")
        return self


Share = Annotated[float, Field(ge=0, le=1)]


class SglangSettings(Section):
    """What only SGLang's scheduler has, by its names; for `batching = 'sglang'`."""

    overlap: bool = Field(
        default=True, description="plan each step while the one before it runs, so that its result is known a step late"
    )
    chunked: bool = Field(default=True, description="compute prompts in chunks of max_num_batched_tokens")
    enable_mixed_chunk: bool = Field(default=False, description="let requests decode beside chunks")
    max_prefill_tokens: Count = Field(
        default=RULES.max_prefill_tokens, description="maximum prompt tokens of one prefill; the first may be longer"
    )
    prefill_max_requests: Count | None = Field(
        default=None, description="maximum requests of one prefill; unset: no limit"
    )
    prefill_decode_interval: CountOrZero = Field(default=0, description="decode steps required after each prefill")
    schedule_conservativeness: PositiveSeconds = Field(
        default=RULES.schedule_conservativeness, description="factor on init_new_token_ratio"
    )
    init_new_token_ratio: Share = Field(
        default=RULES.init_new_token_ratio,
        description="share of its remaining tokens that a running request is first thought to use",
    )
    min_new_token_ratio_factor: Share = Field(
        default=RULES.min_new_token_ratio_factor, description="to which part of that it falls"
    )
    new_token_ratio_decay_steps: Count = Field(
        default=RULES.new_token_ratio_decay_steps, description="in how many decode steps it falls there"
    )
    retract_decode_steps: CountOrZero = Field(
        default=RULES.retract_decode_steps, description="decode steps that a preemption makes room for"
    )
    clip_max_new_tokens: Count = Field(
        default=RULES.clip_max_new_tokens, description="maximum tokens that one request counts as needing"
    )
    reserve_ignored_eos: bool = Field(
        default=RULES.reserve_ignored_eos,
        description="whether running requests that ignore EOS count with all they may produce, as since 0.5.22",
    )
    in_batch_check_threshold: CountOrZero = Field(
        default=RULES.in_batch_check_threshold,
        description="lpm: maximum cached tokens of a request that may be put behind others",
    )
    in_batch_deprioritize_threshold: Count = Field(
        default=RULES.in_batch_deprioritize_threshold,
        description="lpm: leading tokens that it then shares with one ahead of it",
    )
    lora_drain_wait_seconds: Seconds = Field(
        default=0.0,
        description="device seconds after which a waiting request makes another adapter drain"
        " (lora_drain_wait_threshold); 0: never",
    )
    pinned_loras: tuple[Name, ...] = Field(default=(), description="adapters that are never evicted once loaded")

    @property
    def rules(self) -> SglangRules:
        """The rules that a replica follows."""
        own = self.model_dump(exclude={"lora_drain_wait_seconds", "pinned_loras"})
        return SglangRules(
            **own,
            lora_drain_wait_threshold=round(self.lora_drain_wait_seconds * PS_PER_SECOND),
            pinned_loras=frozenset(self.pinned_loras),
        )


class SchedulerSettings(Section):
    """How batches are formed, and the scheduler's limits and timeouts."""

    listen: Address = Field(
        default="127.0.0.1:50052", description="where routers and workers connect, HOST:PORT; port 0 takes a free one"
    )
    metrics: Address = Field(
        default="127.0.0.1:9102", description="where Prometheus reads metrics, HOST:PORT; port 0 takes a free one"
    )

    policy: PolicyName = Field(
        default="req_queue", description="queue policy, which orders waiting requests; docs/policies.md describes each"
    )
    policy_options: PlugInOptions = Field(
        default={}, description="keyword arguments of a custom policy (policy = 'module:Class')"
    )
    batching: BatchingName | None = Field(
        default=None,
        description="how batches are formed; unset: as in the policy's original; continuous for a custom policy",
    )
    batching_options: PlugInOptions = Field(
        default={}, description="keyword arguments of a custom batching (batching = 'module:Class')"
    )
    limits: LimitsName | None = Field(
        default=None,
        description="which limits bound a batch: slora: running_max_req_size and batch_max_tokens; vllm: max_num_seqs"
        " and max_num_batched_tokens, and memory = 'peak' charges exactly; unset: as in the policy's original; vllm"
        " for a custom policy",
    )
    strict: bool = Field(default=False, description="reproduce the published quirks of the policy's original")

    max_total_token_num: Count | None = Field(
        default=None, description="KV pool size in tokens; unset: what each worker announces"
    )
    max_req_input_len: Count = Field(default=2048, description="maximum tokens of a prompt")
    max_req_total_len: Count = Field(default=3072, description="maximum tokens of a prompt and its output together")
    memory: MemoryName = Field(
        default="peak",
        description="how KV memory bounds admission: peak: reserve the combined peak of all running requests; paged:"
        " allocate blocks on demand, and preempt when they run out; no_evict: admit a request only if there are blocks"
        " for its longest possible output; on_demand: blocks of scheduled tokens, as batching = 'vllm' takes them;"
        " estimated: the same, and admission by what running requests are thought to need, as batching = 'sglang' has"
        " it; none: bound only the number of requests",
    )
    block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_TOKENS)] = Field(
        default=16,
        description="paged, on_demand, no_evict, estimated, and prefix_cache.kind = 'blocks' or 'radix': tokens per KV"
        " block",
    )
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.01, description="paged, on_demand: share of the blocks that admission leaves free"
    )
    refuse_never_fits: bool = Field(
        default=True,
        description="refuse a request that an empty worker could not hold to its end; if false, it waits for ever, and"
        " under most policies others behind it, as in vLLM",
    )
    # S-LoRA's limits, and what belongs to its policies
    batch_max_tokens: Count | None = Field(
        default=None,
        description="S-LoRA's limits: maximum prompt tokens of one prefill; unset: max(max_total_token_num // 6,"
        " max_req_total_len)",
    )
    running_max_req_size: Count = Field(
        default=1000, description="S-LoRA's limits: maximum requests running at once on a worker"
    )
    prefetch: bool = Field(default=False, description="slora_loop: load the adapters of the next batch ahead of time")
    fair_weights: tuple[Weight, ...] | dict[str, Weight] = Field(
        default=(),
        description="vtc_fair: weights in the order of the registry, or a table by adapter (by tenant with fair_by ="
        " 'tenant'); missing ones are 1; the weight of an API key takes precedence",
    )
    fair_by: Literal["adapter", "tenant"] | None = Field(
        default=None,
        description="vtc_fair: whether shares are per adapter or per tenant; unset: per adapter, as in S-LoRA",
    )
    fair_max_running: Count | None = Field(
        default=None,
        description="vtc_fair: maximum requests of one adapter or tenant running at once on a worker; unset: no limit",
    )
    batch_num_adapters: Count | None = Field(default=None, description="cluster: maximum distinct adapters in a batch")
    first_token_slo_seconds: Annotated[float, Field(gt=0.5, le=LONGEST_SECONDS)] = Field(
        default=6.0,
        description="abort: TTFT objective in device seconds; a request is dropped once it has waited to within"
        " half a second of it",
    )
    # vLLM's limits
    max_num_seqs: Count = Field(default=256, description="vLLM's limits: maximum requests running at once on a worker")
    max_num_batched_tokens: Count | None = Field(
        default=None,
        description="vLLM's limits: maximum tokens computed in one step; unset: 8192, or max_req_total_len if that is"
        " larger and prompts are not chunked",
    )

    # vLLM's rules
    enable_chunked_prefill: bool = Field(
        default=True,
        description="batching = 'vllm': whether a prompt may be computed over several steps; if not, it waits for a"
        " step that has tokens for all of it",
    )
    long_prefill_token_threshold: CountOrZero = Field(
        default=0,
        description="batching = 'vllm': maximum tokens of one prompt in a step, unless its request is the only one;"
        " 0: no bound",
    )
    long_prefill_token_threshold_adaptive: bool = Field(
        default=False,
        description="batching = 'vllm': raise long_prefill_token_threshold to max_num_batched_tokens divided by the"
        " number of requests",
    )
    max_num_active_seqs: Count | None = Field(
        default=None,
        description="batching = 'vllm': requests beside which a worker admits no other, at most max_num_seqs; unset:"
        " max_num_seqs",
    )
    scheduler_reserve_full_isl: bool = Field(
        default=True,
        description="on_demand: admit a request only if its whole prompt would fit, not just its first chunk",
    )
    async_scheduling: bool = Field(
        default=False,
        description="batching = 'vllm': decide each step while the one before it runs: an arrival waits for one step"
        " more, and an ended request keeps its place for one",
    )

    prefix_cache: PrefixCacheSettings = PrefixCacheSettings()
    sglang: SglangSettings = SglangSettings()

    placement: PlacementName = Field(
        default="least_loaded",
        description="how a worker is chosen for each request; docs/policies.md describes each placement",
    )
    placement_options: PlugInOptions = Field(
        default={}, description="keyword arguments of a custom placement (placement = 'module:Class')"
    )
    placement_homes: Count = Field(
        default=2,
        description="adapter_shards, weighted: workers over which an adapter is sharded; more while none of them has"
        " room",
    )
    placement_draws: Count = Field(
        default=2,
        description="adapter_shards, weighted: further workers drawn at random for each request, as candidates and to"
        " estimate the mean load",
    )
    placement_weights: PlacementWeights = PlacementWeights()
    placement_max_load: LoadLimit = Field(
        default=2.0,
        description="weighted: a worker whose load exceeds this multiple of the candidates' mean is passed over,"
        " whatever its scores; inf: no limit",
    )
    log_placement: bool = Field(default=False, description="log the chosen worker and the reason for each request")
    seed: Seed = Field(default=0, description="seed of the scheduler's random draws")
    journal: PathOrNone = Field(
        default=None, description="JSON Lines file that records all inputs and every step, in device time; unset: none"
    )
    adapters_file: PathOrNone = Field(
        default=None,
        description="file that records adapter loads and unloads at run time; unset: JOURNAL.adapters, beside the"
        " journal, or without a journal no file: the scheduler then learns them from its routers",
    )

    max_waiting_requests: Count = Field(
        default=10_000,
        description="maximum waiting requests over all workers; further requests are refused with RESOURCE_EXHAUSTED",
    )
    max_waiting_requests_per_tenant: Count | None = Field(
        default=None,
        description="maximum waiting requests per tenant, as named by the request or its API key; further requests are"
        " refused with RESOURCE_EXHAUSTED; unset: one tenant may fill the queue",
    )
    deadline_admission: bool = Field(
        default=False,
        description="refuse a request immediately if it is not expected to start before its client's deadline (or"
        " start_within_seconds), and drop it if it is still waiting then; both with RESOURCE_EXHAUSTED",
    )
    start_within_seconds: PositiveSeconds | None = Field(
        default=None,
        description="deadline_admission: device seconds after arrival within which a request must start; unset: only"
        " the client's deadline applies",
    )
    max_pending_router_tokens: Count = Field(
        default=1_000_000,
        description="maximum tokens, of 8 bytes each, buffered for one slow router; beyond that its stream is cut",
    )
    router_timeout_seconds: Interval = Field(
        default=10.0, description="the stream to a router that reads nothing for this long is cut"
    )
    worker_timeout_seconds: Annotated[float, Field(ge=0.1, le=LONGEST_SECONDS, allow_inf_nan=False)] = Field(
        default=5.0,
        description="a worker is considered lost after this long without a message, or without progress on a plan past"
        " the end of the current step",
    )
    worker_wait_seconds: Seconds = Field(
        default=30.0, description="how long a request waits for a worker to attach before it ends with UNAVAILABLE"
    )
    max_worker_losses: Count = Field(
        default=3,
        description="after this many workers were lost while running a request, it ends with INTERNAL instead of"
        " moving to another",
    )
    drain_seconds: Seconds = Field(default=30.0, description="time for running requests to finish after SIGTERM")

    @property
    def step_tokens(self) -> int:
        """The token budget of a step that computes prompts in chunks."""
        return self.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS

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
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs ({self.max_num_active_seqs}) must be at most max_num_seqs ({self.max_num_seqs})"
            )
        if self.batching == "vllm" and not self.enable_chunked_prefill and self.step_tokens < self.max_req_total_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.step_tokens}) must be at least max_req_total_len"
                f" ({self.max_req_total_len}): without enable_chunked_prefill a prompt is computed in one step"
            )
        if self.start_within_seconds is not None and not self.deadline_admission:
            raise ValueError("start_within_seconds needs deadline_admission = true")
        chosen = {**dict(self), "prefix_cache_kind": self.prefix_cache.kind}
        why = why_excluded(chosen) or why_too_few_tokens(
            self.policy, self.batching, self.limits, self.max_req_total_len, chosen
        )
        if why is not None:
            raise ValueError(why)
        for part in ("policy", "batching", "placement"):
            name, options = chosen[part], chosen[f"{part}_options"]
            if options and ":" not in (name or ""):
                raise ValueError(f"{part}_options are for a custom {part}, module:Class; {part} is {name!r}")
        return self
