"""GPUs and models by name, and how many tokens fit.

GPU figures are data sheets' (dense, fp32 accumulate), kernel constants are fits to measured kernels where there are any
(Vidur's tables for A100, H100 and A40; LLMServingSim's for RTX 4090 and RTX PRO 6000) and the mean of those fits where
there are none. Model figures are the published configurations'. GB is 1e9 bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass


class CatalogueError(ValueError):
    """A GPU or model that is not in the catalogue, or that do not go together; the message says what would."""


@dataclass(frozen=True, slots=True)
class KernelFit:
    """How close a GPU's kernels come to its data sheet; see `roofline` for the formulas.

    Attributes:
        gemm_flops: share of peak FLOPS in matrix products. Over 1 where the chip boosts beyond its data sheet.
        gemm_bandwidth: share of peak bandwidth in matrix products.
        gemm_us: constant per matrix product.
        elementwise_bandwidth: share of peak bandwidth in elementwise kernels. Over 1 where they hit the L2 cache.
        elementwise_us: constant per elementwise kernel.
        decode_bandwidth: share of peak bandwidth in decode attention.
        prefill_flops: share of peak FLOPS in prefill attention.
        attention_us: constant per attention kernel.
    """

    gemm_flops: float
    gemm_bandwidth: float
    gemm_us: float
    elementwise_bandwidth: float
    elementwise_us: float
    decode_bandwidth: float
    prefill_flops: float
    attention_us: float


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Cost of summing over the GPUs of one replica: `us` plus the ring's bytes over `gb_per_second`."""

    us: float
    gb_per_second: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as settings spell it.
        tflops: dense 16-bit TFLOPS.
        memory_gb: device memory.
        gb_per_second: memory bandwidth.
        num_sms: streaming multiprocessors.
        fit: how close its kernels come to that.
        all_reduce: between the GPUs of one host.
        pair_all_reduce: between two GPUs joined by a bridge, where that is faster.
    """

    name: str
    tflops: float
    memory_gb: float
    gb_per_second: float
    num_sms: int
    fit: KernelFit
    all_reduce: AllReduce
    pair_all_reduce: AllReduce | None = None


_A100 = KernelFit(0.699, 0.871, 5.43, 0.607, 3.11, 0.813, 0.329, 15.3)  # a 2023 attention kernel
_H100 = KernelFit(0.695, 0.939, 5.73, 0.720, 3.27, 0.85, 0.50, 12.0)  # attention: assumed
_A40 = KernelFit(0.773, 0.803, 3.59, 0.654, 2.28, 0.897, 0.40, 12.4)  # prefill attention: assumed
_RTX_4090 = KernelFit(1.064, 0.958, 2.56, 0.723, 0.0, 0.903, 0.805, 11.7)
_RTX_PRO_6000 = KernelFit(0.777, 0.974, 4.37, 1.726, 2.68, 0.896, 0.584, 11.75)
_UNSEEN = KernelFit(0.73, 0.90, 4.7, 0.80, 2.8, 0.86, 0.47, 12.8)  # the fits are close to one another

# NCCL, measured: DGX A100, DGX H100, A40 over PCIe 4.0, and four GPUs of which pairs are bridged.
_DGX_A100 = AllReduce(50, 185)
_DGX_H100 = AllReduce(35, 345)
_PCIE_4 = AllReduce(60, 5.5)
_BRIDGED_A100 = AllReduce(75, 24)
_BRIDGED_H100 = AllReduce(50, 50)
# Assumed from those: twice the PCIe or NVLink bandwidth, the same start-up time.
_PCIE_5 = AllReduce(60, 11)
_DGX_B200 = AllReduce(35, 690)

_GPUS = (
    Gpu("A10G", 70, 24, 600, 80, _UNSEEN, _PCIE_4),
    Gpu("A40", 149.7, 48, 696, 84, _A40, _PCIE_4),
    Gpu("L4", 121, 24, 300, 58, _UNSEEN, _PCIE_4),
    Gpu("L40S", 362, 48, 864, 142, _UNSEEN, _PCIE_4),
    Gpu("A100-40-SXM", 312, 40, 1555, 108, _A100, _DGX_A100),
    Gpu("A100-80-SXM", 312, 80, 2039, 108, _A100, _DGX_A100),
    Gpu("A100-40-PCIe", 312, 40, 1555, 108, _A100, _BRIDGED_A100, _DGX_A100),
    Gpu("A100-80-PCIe", 312, 80, 1935, 108, _A100, _BRIDGED_A100, _DGX_A100),
    Gpu("H100-SXM", 989, 80, 3350, 132, _H100, _DGX_H100),
    Gpu("H100-PCIe", 756, 80, 2000, 114, _H100, _BRIDGED_H100, _DGX_H100),
    Gpu("H100-NVL", 835, 94, 3900, 132, _H100, _BRIDGED_H100, _DGX_H100),
    Gpu("H200-SXM", 989, 141, 4800, 132, _H100, _DGX_H100),
    Gpu("B200", 2250, 180, 7700, 148, _UNSEEN, _DGX_B200),
    Gpu("RTX-4090", 165.2, 24, 1008, 128, _RTX_4090, _PCIE_4),
    Gpu("RTX-PRO-6000", 503.8, 96, 1597, 188, _RTX_PRO_6000, _PCIE_5),
)

GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}


@dataclass(frozen=True, slots=True)
class Model:
    """One transformer, in 16 bits.

    Attributes:
        name: as settings spell it.
        num_layers: transformer layers.
        hidden: hidden size.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_size: elements of one head.
        ffn: inner size of the feed-forward part (of one expert).
        vocabulary: tokens.
        gated: whether the feed-forward part has a gate beside its up projection.
        num_experts: feed-forward parts per layer.
        experts_per_token: how many of them a token uses.
        rotary: whether positions enter by rotation.
        post_norm: whether the feed-forward part has a norm of its own.
        tied_head: whether the head shares the embedding's weights.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    gated: bool = True
    num_experts: int = 1
    experts_per_token: int = 1
    rotary: bool = True
    post_norm: bool = True
    tied_head: bool = False

    @property
    def num_parameters(self) -> int:
        """Weights, norms and biases left out."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden * heads * self.head_size + self.num_heads * self.head_size * self.hidden
        feed_forward = (3 if self.gated else 2) * self.hidden * self.ffn * self.num_experts
        embedding = (1 if self.tied_head else 2) * self.vocabulary * self.hidden
        return self.num_layers * (attention + feed_forward) + embedding

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, over all GPUs."""
        return 2 * self.num_parameters


_MODELS = (
    Model("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000),
    Model("Llama-2-13B", 40, 5120, 40, 40, 128, 13824, 32000),
    Model("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000),
    Model("LLaMA-65B", 80, 8192, 64, 64, 128, 22016, 32000),
    Model("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    Model("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256),
    Model("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064),
    Model("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064),
    Model("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000),
    Model("Mixtral-8x7B", 32, 4096, 32, 8, 128, 14336, 32000, num_experts=8, experts_per_token=2),
    Model("phi-2", 32, 2560, 32, 32, 80, 10240, 51200, gated=False, post_norm=False),
    Model("CodeLlama-34B", 48, 8192, 64, 8, 128, 22016, 32000),
    Model("internlm-20B", 60, 5120, 40, 40, 128, 13824, 103168),
    Model("Qwen-72B", 80, 8192, 64, 64, 128, 24576, 152064),
    Model("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
    Model("BLOOM-176B", 70, 14336, 112, 112, 128, 57344, 250880, gated=False, rotary=False, tied_head=True),
)

MODELS: Mapping[str, Model] = {model.name: model for model in _MODELS}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name.

    Raises:
        CatalogueError: no such GPU; the message lists those there are.
    """
    if name not in GPUS:
        raise CatalogueError(f"GPU {name!r} is not known; known: {', '.join(GPUS)}")
    return GPUS[name]


def find_model(name: str) -> Model:
    """Return the model of that name.

    Raises:
        CatalogueError: no such model; the message lists those there are.
    """
    if name not in MODELS:
        raise CatalogueError(f"model {name!r} is not known; known: {', '.join(MODELS)}")
    return MODELS[name]


def check_split(model: Model, tensor_parallel: int) -> None:
    """Check that a model can be cut into equal shards.

    Raises:
        CatalogueError: the degree does not divide what has to be divided.
    """
    if model.num_heads % tensor_parallel or model.ffn % tensor_parallel:
        raise CatalogueError(
            f"{model.name} has {model.num_heads} heads and a feed-forward size of {model.ffn};"
            f" tensor_parallel {tensor_parallel} must divide both"
        )


def kv_bytes_per_token(model: Model, tensor_parallel: int = 1) -> int:
    """Return the KV cache bytes of one token over all GPUs: keys and values of two bytes.

    With more GPUs than KV heads each GPU holds a whole head, so heads are stored more than once.
    """
    heads_held = max(model.num_kv_heads, tensor_parallel)
    return 2 * model.num_layers * heads_held * model.head_size * 2


def kv_pool_tokens(gpu: Gpu, model: Model, tensor_parallel: int = 1) -> int:
    """Return how many tokens of KV cache fit beside the weights.

    90 % of the memory is used (engines' usual default), of which activations and graphs take 2 GB per GPU.

    Raises:
        CatalogueError: the weights do not fit, or the degree does not divide the model.
    """
    check_split(model, tensor_parallel)
    memory_bytes = round(gpu.memory_gb * 10**9) * tensor_parallel
    left_bytes = memory_bytes * 9 // 10 - 2 * 10**9 * tensor_parallel - model.weight_bytes
    tokens = left_bytes // kv_bytes_per_token(model, tensor_parallel)
    if tokens < 1:
        raise CatalogueError(
            f"{model.name} does not fit on {tensor_parallel} x {gpu.name}:"
            f" 0.9 x {gpu.memory_gb:g} GB x {tensor_parallel} - 2 GB x {tensor_parallel}"
            f" - {model.weight_bytes / 1e9:.1f} GB of weights = {left_bytes / 1e9:.1f} GB for the KV cache"
        )
    return tokens
