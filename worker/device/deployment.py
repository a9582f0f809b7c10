"""One replica as a step-time model sees it: the model, its GPUs, and how the engine runs it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from lorrery.worker.device.architecture import Model, Precision
from lorrery.worker.device.constant import DEFAULT, StepConstants
from lorrery.worker.device.engine import KERNELS_ONLY, Engine
from lorrery.worker.device.hardware import AllReduce, Gpu, KernelFit
from lorrery.worker.device.lora import REAL_RANKS, LoraKernels
from lorrery.worker.device.memory import SIXTEEN_BITS, USUAL, MemoryUse, kv_pool_tokens
from lorrery.worker.device.profile import ProfileRow
from lorrery.worker.device.steps import EngineStep

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
