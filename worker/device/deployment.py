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
from typing import Literal

from lorrery.worker.device.architecture import Model, Precision, check_split, held_experts
from lorrery.worker.device.architecture import precision as precision_of
from lorrery.worker.device.constant import DEFAULT, StepConstants
from lorrery.worker.device.engine import KERNELS_ONLY, Engine
from lorrery.worker.device.hardware import AllReduce, CatalogueError, Gpu, KernelFit
from lorrery.worker.device.lora import REAL_RANKS, LoraKernels
from lorrery.worker.device.profile import ProfileRow
from lorrery.worker.device.steps import EngineStep


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

    @property
    def fit(self) -> KernelFit:
        """Efficiency of this engine's kernels against the data sheet."""
        return self.gpu.kernels(modern=self.engine.modern)

    @property
    def link(self) -> AllReduce:
        """All-reduce over its GPUs."""
        return self.gpu.link(self.tensor_parallel, modern=self.engine.modern)

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
