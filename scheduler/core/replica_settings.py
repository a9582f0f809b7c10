"""Settings of a replica, and the two families of limits that bound its batches."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from lorrery.scheduler.core.adapters.loads import AdapterOptions
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.queues.early_drop import FIRST_TOKEN_SLO_PS
from lorrery.scheduler.core.queues.pets import Profile
from lorrery.worker.device.deployment import NO_FRONT_END, FrontEndCost


@dataclass(frozen=True, slots=True)
class SglangRules:
    """Settings of SGLang's scheduler that no other engine has; lengths in tokens.

    Attributes:
        max_prefill_tokens: input tokens of a prefill without chunks; its first prompt may be longer.
        chunked: whether prompts are computed in chunks, of the step's token budget.
        enable_mixed_chunk: whether decodes run beside chunks.
        schedule_conservativeness: factor on `init_new_token_ratio`.
        init_new_token_ratio: what share of its remaining tokens a running sequence is first thought to use.
        min_new_token_ratio_factor: the least such share, as a share of the first.
        new_token_ratio_decay_steps: decode steps in which the ratio falls from first to least.
        retract_decode_steps: decode steps that a retraction makes room for.
        clip_max_new_tokens: most new tokens that count as needed by one sequence.
        reserve_ignored_eos: whether sequences that ignore the end-of-sequence token count with a ratio of 1.
        in_batch_check_threshold: most cached tokens of a waiting sequence that may be put behind others.
        in_batch_deprioritize_threshold: leading tokens that it then shares with one before it in the queue.
        prefill_max_requests: sequences in one prefill; None: no limit.
        prefill_decode_interval: decode steps after each prefill; 0: none are required.
        lora_drain_wait_threshold: wait in device picoseconds after which an adapter may make others drain; 0: never.
        pinned_loras: keys of adapters that keep their place once they have one.
        overlap: whether a step is planned while the one before it runs (`core.overlap`).
    """

    max_prefill_tokens: int = 16384
    chunked: bool = True
    enable_mixed_chunk: bool = False
    schedule_conservativeness: float = 1.0
    init_new_token_ratio: float = 0.7
    min_new_token_ratio_factor: float = 0.14
    new_token_ratio_decay_steps: int = 600
    retract_decode_steps: int = 20
    clip_max_new_tokens: int = 4096
    reserve_ignored_eos: bool = True
    in_batch_check_threshold: int = 32
    in_batch_deprioritize_threshold: int = 32
    prefill_max_requests: int | None = None
    prefill_decode_interval: int = 0
    lora_drain_wait_threshold: int = 0
    pinned_loras: frozenset[str] = frozenset()
    overlap: bool = True


DEFAULT = SglangRules()


MAX_NUM_BATCHED_TOKENS = 8192
"""Default token budget of a step; a way to batch that computes whole prompts may need more."""
LOOK_AHEAD = 16
"""Waiting sequences whose adapters are loaded ahead: four times as many as load at once."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of a replica. Names as in S-LoRA and vLLM; `limits` is a key of `LIMITS`.

    Attributes:
        max_overtakes: None: as the way to batch has it.
        memory_tokens: tokens of KV that fit into the memory beside the weights, if the pool takes less of it.
        sglang: for batching = 'sglang'.
        front_end: of the worker, as it announced it.
    """

    policy: str
    max_total_token_num: int
    max_req_total_len: int
    batching: str | None = None
    memory: str = "peak"
    block_size: int = 16
    watermark: float = 0.01
    prefix_cache: str = "none"
    share_within_plan: bool = False
    strict: bool = False
    limits: str | None = None
    running_max_req_size: int = 1000
    batch_max_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    prefetch: bool = False
    min_computed_tokens: int = 1
    fair_weights: Mapping[str, Fraction] = field(default_factory=dict)
    fair_by: str = "adapter"
    fair_max_running: int | None = None
    batch_num_adapters: int = 1
    first_token_slo_ps: int = FIRST_TOKEN_SLO_PS
    profile: Profile | None = None
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_concurrent_loads: int = 4
    blocking_loads: bool = False
    keep_unloaded: bool = False
    max_overtakes: int | None = None
    look_ahead: int = LOOK_AHEAD
    memory_tokens: int = 0
    sglang: SglangRules = DEFAULT
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    max_num_active_seqs: int | None = None
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False
    refuse_never_fits: bool = True
    front_end: FrontEndCost = NO_FRONT_END

    @property
    def adapter_options(self) -> AdapterOptions:
        """Rules of adapter residency; strict: S-LoRA's."""
        if self.strict:
            return AdapterOptions(max_concurrent_loads=1, blocking=True, keep_unused=False)
        return AdapterOptions(
            max_loras=self.max_loras,
            max_slots=self.adapter_slots,
            max_cpu_loras=self.max_cpu_loras,
            max_concurrent_loads=self.max_concurrent_loads,
            blocking=self.blocking_loads,
            keep_unloaded=self.keep_unloaded,
        )

    @property
    def adapter_slots(self) -> int:
        """Slots that adapters on the GPU may take together if `max_loras` is not set.

        The memory beside the weights holds them and the pool, from which adapters in use take their slots. They may
        fill it except for what the longest request needs, and an eighth of it if requests may be as long as the pool.
        """
        most = max(self.memory_tokens, self.max_total_token_num)
        return max(most - self.max_req_total_len, most // 8)

    @property
    def step_tokens(self) -> int:
        """The token budget of a step that computes prompts in chunks."""
        return self.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS


@dataclass(frozen=True, slots=True)
class LimitsFamily:
    """The limits of S-LoRA or vLLM on a batch.

    Attributes:
        of: makes the limits from settings.
        prompt_limit: the setting that bounds the prompt tokens of one prefill.
        exact_memory: whether `memory = 'peak'` charges exactly what a sequence takes, not one token more as in S-LoRA.
    """

    of: Callable[[ReplicaSettings], BatchLimits]
    prompt_limit: str
    exact_memory: bool


def _slora_limits(settings: ReplicaSettings) -> BatchLimits:
    most = settings.batch_max_tokens
    if most is None:
        most = max(settings.max_total_token_num // 6, settings.max_req_total_len)
    return BatchLimits(settings.running_max_req_size, most)


def _vllm_limits(settings: ReplicaSettings) -> BatchLimits:
    most = settings.max_num_batched_tokens
    if most is None:
        most = max(MAX_NUM_BATCHED_TOKENS, settings.max_req_total_len)
    return BatchLimits(settings.max_num_seqs, most, cached_count=False)


LIMITS: dict[str, LimitsFamily] = {
    "slora": LimitsFamily(_slora_limits, prompt_limit="batch_max_tokens", exact_memory=False),
    "vllm": LimitsFamily(_vllm_limits, prompt_limit="max_num_batched_tokens", exact_memory=True),
}


SET = "(set)"


@dataclass(frozen=True, slots=True)
class NotIn:
    """All values but these."""

    values: frozenset[object]


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Settings that a row cannot be combined with.

    Attributes:
        settings: excluded values by setting, which must all match at once; `None` stands for "unset", `SET` for
            "anything but unset or empty", `NotIn` for all others. A setting that is not among the chosen ones matches
            nothing.
        why: the reason, and what to do instead.
    """

    settings: Mapping[str, Collection[object] | NotIn]
    why: str

    def applies(self, chosen: Mapping[str, object]) -> bool:
        """Return whether the chosen settings match this exclusion."""
        return all(name in chosen and is_among(chosen[name], values) for name, values in self.settings.items())


def is_among(value: object, values: Collection[object] | NotIn) -> bool:
    """Return whether a value is one of `values`; see `Exclusion.settings`."""
    if isinstance(values, NotIn):
        return value not in values.values
    if SET in values and value is not None and value != () and value != {}:
        return True
    return any(value == one for one in values)
