"""One replica as a step-time model sees it: the model, its GPUs and their memory, and how the engine runs it.

A GPU's memory is divided into weights, KV cache and adapters:

    left      = u * memory - own * T - weights - adapters        over all T GPUs of a replica
    left      = u * (memory - own * T - weights) - adapters      engines with a share of what the weights leave
    KV tokens = left / (2 L kv d bytes)

u is the share that the engine takes, `own` the memory of activations, CUDA graphs and communication on each GPU.
Figures are over all GPUs of one replica; an adapter's bytes are counted once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from lorrery.worker.device.catalogue.architecture import Model, Precision, check_split, held_experts
from lorrery.worker.device.catalogue.architecture import precision as precision_of
from lorrery.worker.device.catalogue.hardware import AllReduce, Basis, CatalogueError, Gpu, KernelFit
from lorrery.worker.device.constant import DEFAULT, StepConstants
from lorrery.worker.device.lora import REAL_RANKS, LoraKernels
from lorrery.worker.device.profile import ProfileRow
from lorrery.worker.device.steps import EngineStep

_PS_PER_MS = 10**9

EAGER_LAUNCH_US = 40.0
"""CPU time of a kernel launched by itself from Python. Assumed: vLLM of 2023 took 32 to 54 us (`vllm-2023`, over ten
kernels a layer), and NVIDIA times vLLM's all-reduce 20 to 40 us longer launched than in a CUDA graph."""
EAGER_LORA_LAUNCH_US = 150.0
"""CPU time of an adapters' Triton kernel launched likewise, with what vLLM prepares for it. Fitted, beside
`EAGER_LAUNCH_US`, to twenty runs of vLLM 0.30 on an A10 with one to eight adapters (docs/validation.md)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine as a step-time model sees it: the CPU's share of a step, and the choice of kernels.

    The figures and their sources are in `data/engines.toml`.

    Attributes:
        name: as settings spell it.
        launch_ms: CPU time per layer; a floor under the GPU's time. 0 with CUDA graphs.
        lora_launch_ms: further CPU time per layer in a step with adapters.
        prefill_lora_flops: share of the peak FLOPS that adapter kernels reach in a step with a prefill; decodes alone
            reach `lora.FLOPS_SHARE`.
        step_ms: CPU time added to each step.
        sequence_ms: added for each sequence that gets a token.
        prefill_ms: added once to a step with any prefill.
        prefill_token_ms: added for each prompt token of the step.
        layer_us: added for each layer on the GPU: kernels of this engine that those timed one by one do not include.
        event_ms: CPU time of the front end for each token that it sends; no step is shorter than its tokens take.
        request_ms: CPU time of the front end for each request before the engine gets it; see `core.front_end`.
        request_token_ms: likewise for each prompt token.
        attention: whether a step with prefill and decode runs two attention kernels or one; see `attention`.
        kernels: constants of its kernels: the GPU's `fit`, or its `modern_fit` with its `modern_all_reduce`.
        fp8_experts: constants of its experts in 8 bits with a scale per tensor: those of that type, or those with a
            scale per block, if its kernel is not the one that was timed.
        gemm_factor: duration of its matrix products over the fitted one.
        prefill_factor: likewise for prefill attention.
        decode_factor: likewise for decode attention.
        fp8_decode_factor: likewise over an 8-bit cache, in place of `decode_factor`.
        all_reduce_factor: likewise for the part of an all-reduce that does not depend on its bytes.
        separate_add: whether the residual add is a separate kernel.
        head: whether the language-model head is part of the step.
        memory: of a GPU: the label's, or as reported by the device if known.
        memory_share_of: what gpu_memory_utilization is a share of: all memory, or what weights and activations leave.
        basis: of the times and factors.
        source: of the times and factors.
        gpus: names of the GPUs on which they were found; on others they are assumed to hold. Empty: unknown.
        most_sequences: in a step, up to which they were found; with more they are extrapolated. None: unknown.
    """

    name: str
    launch_ms: float = 0.0
    step_ms: float = 0.0
    sequence_ms: float = 0.0
    prefill_ms: float = 0.0
    prefill_token_ms: float = 0.0
    layer_us: float = 0.0
    event_ms: float = 0.0
    request_ms: float = 0.0
    request_token_ms: float = 0.0
    lora_launch_ms: float = 0.0
    prefill_lora_flops: float = 0.25
    attention: Literal["split", "unified"] = "split"
    kernels: Literal["older", "modern"] = "older"
    fp8_experts: Literal["fp8", "fp8_block"] = "fp8"
    gemm_factor: float = 1.0
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    fp8_decode_factor: float = 1.0
    all_reduce_factor: float = 1.0
    separate_add: bool = False
    head: bool = True
    memory: Literal["label", "reported"] = "label"
    memory_share_of: Literal["all", "rest"] = "all"
    basis: Basis = "fitted"
    source: str = ""
    gpus: tuple[str, ...] = ()
    most_sequences: int | None = None

    @property
    def modern(self) -> bool:
        """Whether it runs present-day kernels."""
        return self.kernels == "modern"


class FrontEndCost(NamedTuple):
    """Work of a worker's front end; picoseconds.

    Attributes:
        request_ps: for each request.
        token_ps: for each prompt token.
        servers: API servers, which work side by side.
    """

    request_ps: int = 0
    token_ps: int = 0
    servers: int = 1

    def work_ps(self, prompt_tokens: int) -> int:
        """Return the work of one request."""
        return self.request_ps + self.token_ps * prompt_tokens

    def requests_per_second(self, prompt_tokens: int) -> float:
        """Return how many requests the servers take per second, at most; infinite without work."""
        work_ps = self.work_ps(prompt_tokens)
        return self.servers * 1000 * _PS_PER_MS / work_ps if work_ps else float("inf")


NO_FRONT_END = FrontEndCost()
"""Requests reach the scheduler at once."""


KERNELS_ONLY = Engine("kernels-only")
"""No CPU time."""


def eager_launches(model: Model, tensor_parallel: int) -> int:
    """Return how many kernels of a layer the CPU launches without CUDA graphs, those of adapters apart.

    Products for query, key and value, and for the output; the store of keys and values, and attention; of a
    feed-forward part two products and the activation, of a mixture the router, the choice of experts, the sorting of
    tokens, two grouped products, the activation and the sum; norms, rotation, and two all-reduces.
    """
    feed_forward = 3 if model.num_experts == 1 else 7 + (3 if model.shared_ffn else 0)
    norms = 1 + model.post_norm + (2 if model.query_key_norms else 0)
    return 4 + model.rotary + norms + feed_forward + (2 if tensor_parallel > 1 else 0)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """How an engine uses a GPU's memory.

    Attributes:
        share: of the memory that it takes.
        own_gb: on each GPU for activations, graphs and communication; 2 is an assumption.
        of_rest: whether the share is of what weights and `own_gb` leave.
        reported: whether to use the memory that the device reports, if known, instead of the label's.
    """

    share: Fraction = Fraction(9, 10)
    own_gb: float = 2.0
    of_rest: bool = False
    reported: bool = False

    def memory_gb(self, gpu: Gpu) -> float:
        """Return the memory of one GPU."""
        reported = gpu.usable_memory_gb if self.reported else None
        return gpu.memory_gb if reported is None else reported

    def left_bytes(self, gpu: Gpu, tensor_parallel: int, weights: int) -> int:
        """Return the bytes left by the weights."""
        memory = round(self.memory_gb(gpu) * 10**9) * tensor_parallel
        own = round(self.own_gb * 10**9) * tensor_parallel
        if self.of_rest:
            return (memory - own - weights) * self.share.numerator // self.share.denominator
        return memory * self.share.numerator // self.share.denominator - own - weights

    def shown(self, gpu: Gpu, tensor_parallel: int, weights: int) -> str:
        """Write `left_bytes` as a sum."""
        share, memory = f"{float(self.share):g}", f"{self.memory_gb(gpu):g} GB x {tensor_parallel}"
        taken = f"{self.own_gb:g} GB x {tensor_parallel} - {weights / 1e9:.1f} GB of weights"
        return f"{share} x ({memory} - {taken})" if self.of_rest else f"{share} x {memory} - {taken}"


def profiled_gb(model: Model, tensor_parallel: int, step_tokens: int, sequences: int) -> float:
    """Return GB that vLLM sets aside on each GPU, having run its largest step: activations, logits, and a GB beside.

    A layer's inputs and outputs of each token, and half of the 32-bit logits of each sequence. Assumed; found to agree
    with the cache sizes that vLLM 0.24 printed on H100 (Llama-3.1-8B, steps of 8,192 tokens) and with how many requests
    ran at once on an RTX 4090 (Llama-3.1-8B) and an A100 (Qwen3-32B), steps of 2,048.
    """
    ffn = model.ffn * model.experts_per_token + model.shared_ffn
    a_token = 2 * (4 * model.hidden + 2 * ffn / tensor_parallel)
    return 1.05 + (step_tokens * a_token + sequences * 2 * model.vocabulary / tensor_parallel) / 1e9


USUAL = MemoryUse()
SIXTEEN_BITS = Precision()


def weight_bytes(model: Model, precision: Precision = SIXTEEN_BITS, expert_parallel: int = 1) -> int:
    """Return the bytes of a model's weights; the embedding and the head are in 16 bits whatever the precision.

    If groups of GPUs hold unequal numbers of experts, every group counts as the fullest: the KV cache has the same size
    on all.
    """
    spare = held_experts(model.num_experts, expert_parallel) * expert_parallel - model.num_experts
    experts = 0
    if model.num_experts > 1:
        experts = model.num_layers * model.num_experts * model.expert_parameters
    others = (model.layer_parameters - experts) * precision.weight_bytes
    experts += model.num_layers * spare * model.expert_parameters
    return round(others + experts * precision.expert_bytes) + 2 * model.embedding_parameters


def kv_bytes_per_token(model: Model, tensor_parallel: int = 1, precision: Precision = SIXTEEN_BITS) -> int:
    """Return the KV cache bytes of one token over all GPUs: keys and values.

    With more GPUs than KV heads each GPU holds a whole head, so heads are stored more than once. Layers with a window
    hold only the last few tokens, which do not count.
    """
    heads_held = max(model.num_kv_heads, tensor_parallel)
    return 2 * model.full_layers * heads_held * model.head_size * precision.kv_bytes


def kv_pool_tokens(
    gpu: Gpu,
    model: Model,
    tensor_parallel: int = 1,
    precision: Precision = SIXTEEN_BITS,
    adapter_bytes: int = 0,
    use: MemoryUse = USUAL,
    expert_parallel: int = 1,
) -> int:
    """Return how many tokens of KV cache fit beside the weights.

    Args:
        gpu: each of the replica's GPUs.
        model: that it serves.
        tensor_parallel: number of GPUs.
        precision: of weights and cache.
        adapter_bytes: memory set aside for adapters.
        use: the engine's use of memory.
        expert_parallel: groups of GPUs over which experts are distributed.

    Raises:
        CatalogueError: the weights do not fit (the message shows the sum), or the degree does not divide the model.
    """
    check_split(model, tensor_parallel, expert_parallel)
    weights = weight_bytes(model, precision, expert_parallel)
    left = use.left_bytes(gpu, tensor_parallel, weights) - adapter_bytes
    tokens = left // kv_bytes_per_token(model, tensor_parallel, precision)
    if tokens < 1:
        adapters = f" - {adapter_bytes / 1e9:.1f} GB of adapters" if adapter_bytes else ""
        published = weight_bytes(model, precision_of(model.checkpoint, "bfloat16"), expert_parallel)
        hint = f"; its checkpoint is in {model.checkpoint}, {published / 1e9:.1f} GB" if published < weights else ""
        raise CatalogueError(
            f"{model.name} does not fit on {tensor_parallel} x {gpu.name}:"
            f" {use.shown(gpu, tensor_parallel, weights)}{adapters} = {left / 1e9:.1f} GB for the KV cache{hint}"
        )
    return tokens


MoeBackend = Literal["auto", "marlin"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """One replica.

    Attributes:
        gpu: each of its GPUs.
        model: that it serves.
        tensor_parallel: number of GPUs.
        precision: of weights and KV cache.
        engine: the CPU's share and the choice of kernels; no CPU time by default.
        lora: how adapters are computed.
        memory: how much of the GPU's memory the engine takes.
        profile: measured steps, for the model `table`.
        steps: a log of an engine's steps, for the model `fitted`.
        constants: for the model `constant`.
        expert_parallel: groups of GPUs over which a mixture's experts are distributed; a group's GPUs cut each expert.
        expert_distribution: how unevenly tokens use experts, one of `moe.DISTRIBUTIONS`.
        moe_backend: whose kernels compute experts: those that the engine chooses, or Marlin's.
        enforce_eager: whether the engine runs without CUDA graphs, so that the CPU launches every kernel.
        api_servers: processes of the engine's front end; 0: it has none.
        peer_to_peer: whether its GPUs reach each other's memory.
    """

    gpu: Gpu
    model: Model
    tensor_parallel: int = 1
    precision: Precision = SIXTEEN_BITS
    engine: Engine = KERNELS_ONLY
    lora: LoraKernels = REAL_RANKS
    memory: MemoryUse = USUAL
    profile: Sequence[ProfileRow] = ()
    steps: Sequence[EngineStep] = ()
    constants: StepConstants = DEFAULT
    expert_parallel: int = 1
    expert_distribution: str = "served"
    moe_backend: MoeBackend = "auto"
    enforce_eager: bool = False
    api_servers: int = 1
    peer_to_peer: bool = True

    @property
    def fit(self) -> KernelFit:
        """Efficiency of this engine's kernels against the data sheet."""
        return self.gpu.kernels(modern=self.engine.modern)

    @property
    def link(self) -> AllReduce:
        """All-reduce over its GPUs."""
        return self.gpu.link(self.tensor_parallel, modern=self.engine.modern, peer_to_peer=self.peer_to_peer)

    @property
    def front_end(self) -> FrontEndCost:
        """Work of its front end on requests."""
        request_ps, token_ps = (round(ms * _PS_PER_MS) for ms in (self.engine.request_ms, self.engine.request_token_ms))
        has_work = self.api_servers and (request_ps or token_ps)
        return FrontEndCost(request_ps, token_ps, self.api_servers) if has_work else NO_FRONT_END

    @property
    def reserved_bytes(self) -> int:
        """Memory set aside for places of adapters."""
        return self.lora.reserved_bytes(self.model, self.tensor_parallel, self.expert_parallel)

    def kv_pool_tokens(self, adapter_bytes: int = 0, used: Fraction | None = None) -> int:
        """Return how many tokens of KV cache fit; see `memory.kv_pool_tokens`.

        Args:
            adapter_bytes: of adapters, beside `reserved_bytes`.
            used: share of the memory, in place of the engine's.

        Raises:
            CatalogueError: the weights do not fit; the message shows the sum.
        """
        use = self.memory if used is None else replace(self.memory, share=used)
        adapter_bytes += self.reserved_bytes
        return kv_pool_tokens(
            self.gpu, self.model, self.tensor_parallel, self.precision, adapter_bytes, use, self.expert_parallel
        )
