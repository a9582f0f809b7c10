"""What an inference engine is to a step-time model: the CPU's share of a step, and which kernels run.

The figures and their sources are in `data/engines.toml`.
"""

from dataclasses import dataclass
from typing import Literal

from lorrery.worker.device.hardware import Basis


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine.

    Attributes:
        name: as settings spell it.
        launch_ms: of the CPU per layer; a floor under the GPU's time. 0 with CUDA graphs.
        lora_launch_ms: further CPU time per layer in a step with adapters.
        prefill_lora_flops: share of the peak FLOPS that adapter kernels reach in a step with a prefill; decodes alone
            reach `lora.FLOPS_SHARE`.
        step_ms: of the CPU, added to each step.
        sequence_ms: added for each sequence that gets a token.
        prefill_ms: added once to a step with any prefill.
        prefill_token_ms: added for each prompt token of the step.
        attention: whether a step with prefill and decode runs two attention kernels or one; see `attention`.
        kernels: whose kernels run: those of the GPU's `fit`, or of its `modern_fit` with its `modern_all_reduce`.
        fp8_experts: whose constants its experts have in 8 bits with a scale per tensor: those of that type, or with a
            scale per block, where its kernel is not the one that was timed.
        gemm_factor: how long its matrix products take, against those that were fitted.
        prefill_factor: the same of prefill attention.
        decode_factor: the same of decode attention.
        fp8_decode_factor: the same over an 8-bit cache, in place of `decode_factor`.
        all_reduce_factor: the same of what an all-reduce takes whatever its bytes are.
        separate_add: whether the residual add is a kernel of its own.
        head: whether the language-model head is part of the step.
        memory: of a GPU: what its label says, or what the device reports, where that is known.
        memory_share_of: what gpu_memory_utilization is a share of: all memory, or what weights and activations leave.
        basis: what the times and factors rest on.
        source: where they are from.
        gpus: names of the GPUs on which they were found; elsewhere they are assumed to hold. Empty: not said.
        most_sequences: in a step, with which they were found; with more they are extrapolated. None: not said.
    """

    name: str
    launch_ms: float = 0.0
    step_ms: float = 0.0
    sequence_ms: float = 0.0
    prefill_ms: float = 0.0
    prefill_token_ms: float = 0.0
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
        """Whether present-day kernels run."""
        return self.kernels == "modern"


KERNELS_ONLY = Engine("kernels-only")
"""No CPU at all."""
