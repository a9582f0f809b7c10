"""An inference engine as a step-time model sees it: the CPU's share of a step, and the choice of kernels.

The figures and their sources are in `data/engines.toml`.
"""

from dataclasses import dataclass
from typing import Literal

from lorrery.worker.device.architecture import Model
from lorrery.worker.device.hardware import Basis

EAGER_LAUNCH_US = 40.0
"""CPU time of a kernel launched by itself from Python. Assumed: vLLM of 2023 took 32 to 54 us (`vllm-2023`, over ten
kernels a layer), and NVIDIA times vLLM's all-reduce 20 to 40 us longer launched than in a CUDA graph."""
EAGER_LORA_LAUNCH_US = 150.0
"""CPU time of an adapters' Triton kernel launched likewise, with what vLLM prepares for it. Fitted, beside
`EAGER_LAUNCH_US`, to twenty runs of vLLM 0.30 on an A10 with one to eight adapters (docs/validation.md)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine.

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
