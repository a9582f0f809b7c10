"""The step-time model's prediction for one measured kernel, by the functions that make up a step.

NCCL's all-reduces are compared with the link of the vendor's library; vLLM's custom kernel, which engines run inside
CUDA graphs, with the link of graphs, up to the largest message for which it is fitted.

NVIDIA's collector counts a message in numbers of 16 bits, although the column of its rows here is called bytes: on A100
vLLM's kernel gives way to NCCL between 2 Mi and 4 Mi of them, and its limit is 8 MiB; and the bus bandwidth of NCCL
over 32 Mi of them is that of Vidur's DGX A100 and DGX H100 (185 and 345 GB/s) for 64 MiB, not half of it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.attention import AttentionKernels, Heads
from lorrery.worker.device.basis import kernel_ground, link_ground, no_measurement
from lorrery.worker.device.batch import PrefillChunk
from lorrery.worker.device.calibration.kernel_rows import (
    OPS,
    AllReduceShape,
    AttentionShape,
    GemmShape,
    KernelRow,
    LoraShape,
    MoeShape,
    SegmentedLoraShape,
)
from lorrery.worker.device.catalogue.hardware import (
    EXPERT_TYPES,
    KV_TYPES,
    SIXTEEN,
    TYPE_BYTES,
    WEIGHT_TYPES,
    CatalogueError,
    Gpu,
)
from lorrery.worker.device.catalogue.tables import Catalogue
from lorrery.worker.device.kernels import KernelTimes, Products, compute_type
from lorrery.worker.device.lora_kernels import Slices, grouped_seconds, segmented_seconds
from lorrery.worker.device.moe import SERVED, ExpertKernels, Experts

_LAYERS = 100
"""Attention is computed for this many layers and divided: a coefficient of one layer would lose digits to rounding."""


class SingleKernels:
    """The kernels of one GPU, in seconds, each launched by itself.

    Args:
        gpu: that runs them.
        modern: whether they are a present-day engine's, or an older one's.
    """

    def __init__(self, gpu: Gpu, *, modern: bool = True) -> None:
        self._gpu, self._fit, self._modern = gpu, gpu.kernels(modern=modern), modern
        self._products = Products(gpu, self._fit)
        self._attentions: dict[Heads, AttentionKernels] = {}

    def gemm(self, rows: int, columns: int, inner: int, weight_type: str = SIXTEEN) -> float:
        """Return the seconds of one matrix product.

        Args:
            rows: tokens.
            columns: output elements.
            inner: input elements.
            weight_type: one of `hardware.WEIGHT_TYPES`.
        """
        times = KernelTimes()
        self._products.add(times, rows, columns, inner, weight_type, TYPE_BYTES[weight_type])
        return max(times.seconds, self._fit.gemm_of(weight_type).launch_us * 1e-6)

    def prefill(self, batch: int, tokens: int, heads: Heads) -> float:
        """Return the seconds of attention for `batch` prompts of `tokens` tokens each, none of them cached."""
        chunks = (PrefillChunk(tokens, 0, samples=True),) * batch
        return self._attention(heads).prefill_ps(chunks) / PS_PER_SECOND / _LAYERS

    def decode(self, batch: int, tokens: int, heads: Heads) -> float:
        """Return the seconds of attention for `batch` sequences that each add a token to `tokens` cached ones."""
        return self._attention(heads).decode_ps(batch, batch * tokens, tokens) / PS_PER_SECOND / _LAYERS

    def moe(
        self,
        tokens: int,
        experts: Experts,
        weight_type: str = SIXTEEN,
        *,
        cut: int = 1,
        expert_parallel: int = 1,
        distribution: str = SERVED,
    ) -> float | None:
        """Return the seconds of a layer's experts on one GPU; None if its kernels' constants are unknown.

        Args:
            tokens: of all GPUs.
            experts: of the whole layer.
            weight_type: one of `hardware.WEIGHT_TYPES`.
            cut: GPUs over which each expert is cut.
            expert_parallel: groups of GPUs over which the experts are distributed.
            distribution: how unevenly tokens use experts, one of `moe.DISTRIBUTIONS`.

        Raises:
            CatalogueError: unknown distribution, or an expert that cannot be cut this way.
        """
        num_bytes = TYPE_BYTES[weight_type]
        tflops, weight_type = compute_type(self._gpu, weight_type)
        if (fit := self._fit.moe_of(weight_type)) is None:
            return None
        kernels = ExpertKernels(
            self._gpu,
            fit,
            experts,
            tflops=tflops,
            weight_bytes=num_bytes,
            expert_parallel=expert_parallel,
            cut=cut,
            distribution=distribution,
        )
        return kernels.times(tokens).seconds

    def lora(self, slices: Slices, tokens: int, adapters: int, places: int, rank: int) -> float:
        """Return the seconds of one layer's adapters in vLLM's kernels; see `grouped_lora.grouped_seconds`."""
        return grouped_seconds(self._gpu.grouped_lora, slices, tokens, adapters, places, rank)

    def segmented_lora(self, slices: Slices, tokens: int, segments: int, slots: int, rank: int) -> float:
        """Return the seconds of one layer's adapters in SGLang's kernels; see `segmented_lora.segmented_seconds`."""
        return segmented_seconds(self._gpu.segmented_lora, slices, tokens, segments, slots, rank, rank)

    def all_reduce(self, num_bytes: int, num_gpus: int, *, graph: bool = True) -> float:
        """Return the seconds of one sum over the GPUs: by the engine in a CUDA graph, or by the vendor's library."""
        return self._gpu.link(num_gpus, modern=self._modern and graph).seconds(num_bytes, num_gpus)

    def _attention(self, heads: Heads) -> AttentionKernels:
        if heads not in self._attentions:
            self._attentions[heads] = AttentionKernels(self._gpu, self._fit, heads, _LAYERS)
        return self._attentions[heads]


MOST_GRAPH_BYTES = 256 * 2**20
"""Message beyond which no engine runs the kernel of graphs: NCCL takes over long before."""
NO_MEASUREMENT = "no measurement"
_NUMBER_BYTES = 2
"""Bytes of one number in NVIDIA's messages; only NVIDIA's rows name the library's version."""

_TYPES: Mapping[str, str] = {"": SIXTEEN, "bfloat16": SIXTEEN, "float16": SIXTEEN}
"""Spelling in rows -> spelling in fits; all others are equal."""


class Prediction(NamedTuple):
    """The model's prediction for a row.

    Attributes:
        us: microseconds; None if there is no prediction.
        why: reason for no prediction; empty otherwise.
        basis: of the constants: measured, fitted, assumed, or no measurement.
    """

    us: float | None
    why: str = ""
    basis: str = ""


class KernelPredictions:
    """Predicts rows.

    Args:
        catalogue: of GPUs.
        gpu: for rows that name none.
    """

    def __init__(self, catalogue: Catalogue, gpu: str = "") -> None:
        self._catalogue, self._gpu_name = catalogue, gpu
        self._gpus: dict[str, OneGpu | str] = {}

    def predict(self, row: KernelRow) -> Prediction:
        """Predict the duration of a row's kernel, or return why there is no prediction."""
        name = row.gpu or self._gpu_name
        known = self._gpus.get(name)
        if known is None:
            known = self._gpus[name] = self._find(name)
        return Prediction(None, known) if isinstance(known, str) else known.predict(row)

    def _find(self, name: str) -> "OneGpu | str":
        if not name:
            return "no GPU named; say which with --gpu"
        try:
            return OneGpu(self._catalogue.gpu(name))
        except CatalogueError as error:
            return f"{error}; --catalogue names a file with others"


class OneGpu:
    """Predicts the rows of one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._kernels = SingleKernels(gpu)

    def predict(self, row: KernelRow) -> Prediction:
        """Predict the duration of a row's kernel, or return why there is no prediction."""
        if (why := why_not(row)) is not None:
            return Prediction(None, why)
        try:
            return Prediction(self.seconds(row) * 1e6, "", self._basis(row))
        except CatalogueError as error:
            return Prediction(None, f"op {row.op}: {error}")

    def seconds(self, row: KernelRow) -> float:
        """Return the seconds of a row's kernel, for which `why_not` must return None.

        Raises:
            CatalogueError: experts that cannot be cut or distributed this way, or without constants in this GPU's fit.
        """
        match row.shape:
            case GemmShape(m, n, k):
                return self._kernels.gemm(m, n, k, weight_type(row))
            case AttentionShape(batch, tokens, q_heads, kv_heads, size):
                kv = kv_type(row)
                heads = Heads(q_heads, kv_heads, size, 2 if kv == SIXTEEN else 1, kv)
                if row.op == "attention_prefill":
                    return self._kernels.prefill(batch, tokens, heads)
                return self._kernels.decode(batch, tokens, heads)
            case AllReduceShape(_, num_gpus):
                return self._kernels.all_reduce(message_bytes(row), num_gpus, graph=not is_library(row))
            case MoeShape():
                return self._experts(row.shape, weight_type(row))
            case LoraShape(tokens, inner, outer, widest, slices, adapters, max_loras, rank):
                return self._kernels.lora(Slices(inner, outer, widest, slices), tokens, adapters, max_loras, rank)
            case SegmentedLoraShape(tokens, inner, outer, slices, segments, slots, rank):
                return self._kernels.segmented_lora(Slices(inner, outer, outer, slices), tokens, segments, slots, rank)
            case None:
                raise AssertionError(row)

    def _experts(self, shape: MoeShape, weights: str) -> float:
        experts = Experts(shape.hidden, shape.ffn, shape.num_experts, shape.top_k)
        seconds = self._kernels.moe(
            shape.tokens,
            experts,
            weights,
            cut=shape.moe_tp,
            expert_parallel=shape.moe_ep,
            distribution=shape.distribution,
        )
        if seconds is None:
            raise CatalogueError("the GPU's fit has no constants for experts")
        return seconds

    def _basis(self, row: KernelRow) -> str:
        gpu = self._gpu
        if isinstance(row.shape, AllReduceShape):
            num_gpus = row.shape.num_gpus
            return link_ground(gpu.link(num_gpus, modern=not is_library(row)), gpu, num_gpus).basis
        if no_measurement(gpu):
            return NO_MEASUREMENT
        match row.shape:
            case GemmShape():
                return kernel_ground(gpu, "gemm", weight_type(row)).basis
            case MoeShape():
                return kernel_ground(gpu, "moe", weight_type(row)).basis
            case LoraShape():
                return kernel_ground(gpu, "lora", SIXTEEN).basis
            case SegmentedLoraShape():
                return kernel_ground(gpu, "lora_segmented", SIXTEEN).basis
            case _:
                return kernel_ground(gpu, "attention", kv_type(row)).basis


def why_not(row: KernelRow) -> str | None:
    """Return why no GPU's kernels can predict a row; None if they can."""
    match row.shape:
        case None:
            return f"op {row.op!r} is not known; known: {', '.join(OPS)}"
        case GemmShape() if weight_type(row) not in WEIGHT_TYPES:
            return f"dtype {row.dtype!r} is not known; known: bfloat16, float16, {', '.join(WEIGHT_TYPES[1:])}"
        case MoeShape() if weight_type(row) not in EXPERT_TYPES:
            return f"dtype {row.dtype!r} is not known; known: bfloat16, float16, {', '.join(EXPERT_TYPES[1:])}"
        case LoraShape() | SegmentedLoraShape() if weight_type(row) != SIXTEEN:
            return f"dtype {row.dtype!r} of adapters is not known; known: bfloat16, float16"
        case AttentionShape() if kv_type(row) not in KV_TYPES:
            return f"kv_dtype {row.kv_dtype!r} is not known; known: bfloat16, float16, {', '.join(KV_TYPES[1:])}"
        case AllReduceShape() if not is_library(row) and message_bytes(row) > MOST_GRAPH_BYTES:
            return f"a custom all-reduce of more than {MOST_GRAPH_BYTES >> 20} MiB, where engines run another kernel"
        case _:
            return None


def weight_type(row: KernelRow) -> str:
    """Return the type of a row's weights, as spelled in fits."""
    name = row.dtype.lower()
    return _TYPES.get(name, name)


def kv_type(row: KernelRow) -> str:
    """Return the type of a row's KV cache, as spelled in fits."""
    name = row.kv_dtype.lower()
    return _TYPES.get(name, name)


def message_bytes(row: KernelRow) -> int:
    """Return the bytes that an all-reduce sums on each GPU; 0 for another kernel."""
    if not isinstance(row.shape, AllReduceShape):
        return 0
    return row.shape.message_bytes * (_NUMBER_BYTES if row.version else 1)


def is_library(row: KernelRow) -> bool:
    """Return whether an all-reduce is the vendor library's, not an engine's own kernel."""
    return "custom" not in row.kernel.lower()
