"""What the step-time model says of one kernel by itself, by the functions that a step is summed up from.

NCCL's all-reduces are held against NCCL's link; vLLM's custom kernel, which engines run inside CUDA graphs, against the
link of graphs, up to the largest message for which engines run it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lorrery.worker.device.architecture import Precision, precision
from lorrery.worker.device.attention import Heads
from lorrery.worker.device.basis import no_measurement
from lorrery.worker.device.catalogue import Catalogue
from lorrery.worker.device.errors import CatalogueError
from lorrery.worker.device.kernel_rows import OPS, AllReduceShape, AttentionShape, GemmShape, KernelRow, MoeShape
from lorrery.worker.device.moe import Experts
from lorrery.worker.device.single import SingleKernels

MOST_GRAPH_BYTES = 128 * 2**20
"""Message beyond which an all-reduce is never that of a graph: NCCL takes over long before."""


class Prediction(NamedTuple):
    """What the model says of a row.

    Attributes:
        us: microseconds; None if it says nothing.
        why: it says nothing; empty otherwise.
        basis: of the constants: measured, fitted, assumed, or no measurement.
    """

    us: float | None
    why: str = ""
    basis: str = ""


@dataclass(frozen=True, slots=True)
class _Known:
    """One GPU with one pair of types."""

    kernels: SingleKernels
    precision: Precision
    basis: str


class KernelPredictions:
    """Predicts rows.

    Args:
        catalogue: where GPUs are looked up.
        gpu: of rows that name none.
    """

    def __init__(self, catalogue: Catalogue, gpu: str = "") -> None:
        self._catalogue, self._gpu_name = catalogue, gpu
        self._known: dict[tuple[str, str, str], _Known | str] = {}

    def predict(self, row: KernelRow) -> Prediction:
        """Say how long a row's kernel takes, or why the model does not know."""
        known = self._look_up(row.gpu or self._gpu_name, row.dtype, row.kv_dtype)
        if isinstance(known, str):
            return Prediction(None, known)
        match row.shape:
            case GemmShape(m, n, k):
                seconds = known.kernels.gemm(m, n, k, known.precision.weight_type)
            case AttentionShape(batch, tokens, query, kv, size):
                heads = Heads(query, kv, size, known.precision.kv_bytes, known.precision.kv_type)
                attend = known.kernels.prefill if row.op == "attention_prefill" else known.kernels.decode
                seconds = attend(batch, tokens, heads)
            case AllReduceShape(message_bytes, num_gpus):
                graph = "graph" in row.kernel
                if graph and message_bytes > MOST_GRAPH_BYTES:
                    return Prediction(None, "all_reduce of more than 128 MiB, for which no graph runs this kernel")
                seconds = known.kernels.all_reduce(message_bytes, num_gpus, graph=graph)
            case MoeShape():
                return self._experts(known, row.shape)
            case None:
                return Prediction(None, f"op {row.op!r} is not known; known: {', '.join(OPS)}")
            case _:
                return Prediction(None, f"op {row.op} has no function yet")
        return Prediction(seconds * 1e6, "", known.basis)

    def _experts(self, known: _Known, shape: MoeShape) -> Prediction:
        experts = Experts(shape.hidden, shape.ffn, shape.num_experts, shape.top_k)
        try:
            seconds = known.kernels.moe(
                shape.tokens,
                experts,
                known.precision.weight_type,
                cut=shape.moe_tp,
                expert_parallel=shape.moe_ep,
                distribution=shape.distribution,
            )
        except CatalogueError as error:
            return Prediction(None, str(error))
        if seconds is None:
            return Prediction(None, "op moe: the GPU's fit has no constants for experts")
        return Prediction(seconds * 1e6, "", known.basis)

    def _look_up(self, gpu_name: str, dtype: str, kv_dtype: str) -> "_Known | str":
        key = gpu_name, dtype, kv_dtype
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._find(*key)
        return found

    def _find(self, gpu_name: str, dtype: str, kv_dtype: str) -> "_Known | str":
        if not gpu_name:
            return "no GPU named; say which with --gpu"
        try:
            gpu = self._catalogue.gpu(gpu_name)
            bits = precision(dtype, kv_dtype or "bfloat16")
        except CatalogueError as error:
            return str(error)
        basis = "no measurement" if no_measurement(gpu) else gpu.modern_fit.basis
        return _Known(SingleKernels(gpu), bits, basis)
