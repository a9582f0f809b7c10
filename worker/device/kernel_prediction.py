"""What the step-time model says of one kernel by itself, by the functions that a step is summed up from.

NCCL's all-reduces are held against NCCL's link; vLLM's custom kernel, which engines run inside CUDA graphs, against the
link of graphs, up to the largest message for which engines run it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lorrery.worker.device.architecture import Model, Precision, precision
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.catalogue import DEFAULT_FIT, Catalogue
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.engine import Engine
from lorrery.worker.device.errors import CatalogueError
from lorrery.worker.device.hardware import Gpu
from lorrery.worker.device.kernel_rows import OPS, AllReduceShape, AttentionShape, GemmShape, KernelRow
from lorrery.worker.device.kernels import KernelTimes, LinearKernels
from lorrery.worker.device.roofline import Roofline

MOST_GRAPH_BYTES = 128 * 2**20
"""Message beyond which an all-reduce is never that of a graph: NCCL takes over long before."""

_KERNELS = Engine("kernels", modern_attention=True, head=False)


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

    gpu: Gpu
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
        self._attention: dict[tuple[int, int, int, int], Roofline] = {}
        self._linear: dict[int, LinearKernels] = {}

    def predict(self, row: KernelRow) -> Prediction:
        """Say how long a row's kernel takes, or why the model does not know."""
        known = self._look_up(row.gpu or self._gpu_name, row.dtype, row.kv_dtype)
        if isinstance(known, str):
            return Prediction(None, known)
        match row.shape:
            case GemmShape(m, n, k):
                us = self._gemm(known, m, n, k)
            case AttentionShape():
                us = self._attend(known, row.op, row.shape)
            case AllReduceShape():
                if "graph" in row.kernel and row.shape.message_bytes > MOST_GRAPH_BYTES:
                    return Prediction(None, "all_reduce of more than 128 MiB, for which no graph runs this kernel")
                link = known.gpu.link(row.shape.num_gpus)
                degree = row.shape.num_gpus
                ring = 2 * (degree - 1) / degree * row.shape.message_bytes
                us = link.us + ring / link.gb_per_second / 1e3
            case None:
                return Prediction(None, f"op {row.op!r} is not known; known: {', '.join(OPS)}")
            case _:
                return Prediction(None, f"op {row.op} has no function yet")
        return Prediction(us, "", known.basis)

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
        basis = "no measurement" if gpu.fit_name == DEFAULT_FIT else "fitted"
        return _Known(gpu, bits, basis)

    def _gemm(self, known: _Known, m: int, n: int, k: int) -> float:
        linear = self._linear.get(id(known))
        if linear is None:
            one = Model("one", 1, 128, 1, 1, 128, 128, 1)
            linear = LinearKernels(known.gpu, known.gpu.modern_fit, one, 1, known.precision, separate_add=False)
            self._linear[id(known)] = linear
        times = KernelTimes()
        linear._gemm(times, m, n, k)  # noqa: SLF001
        return times.seconds * 1e6

    def _attend(self, known: _Known, op: str, shape: AttentionShape) -> float:
        key = id(known), shape.q_heads, shape.kv_heads, shape.head_size
        model = self._attention.get(key)
        if model is None:
            one = Model("one", 1, 128, shape.q_heads, shape.kv_heads, shape.head_size, 128, 1)
            model = Roofline(Deployment(known.gpu, one, precision=known.precision, engine=_KERNELS))
            self._attention[key] = model
        if op == "attention_prefill":
            batch = Batch((PrefillChunk(shape.tokens, 0, samples=True),) * shape.batch)
        else:
            batch = Batch((), shape.batch, shape.batch * shape.tokens, shape.tokens)
        return model.attention_seconds(batch) * 1e6
