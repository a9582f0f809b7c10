"""Times of the linear kernels of one step: matrix products, elementwise kernels, all-reduce. Seconds, bytes, FLOP.

For a model with L layers, hidden size h, q query and kv KV elements per token, feed-forward size f, vocabulary V, cut
over T GPUs (q/T, kv/T, f/T, V/T below); a GPU with F FLOPS and B bytes per second; n tokens; weights of w bytes:

    gemm(n, N, K) = sqrt(C^2 + M^2 + I^2) + t_gemm  C = 2 m (N + N_0) (K + K_0) / (F e)    M = (wNK + 2nK + 2nN) / (B e)
    m             = n rounded up to whole tiles: of `least_rows` up to 64 tokens, 64 rows up to 256, `tile` rows beyond
    I             = K t_inner * min(rows of a block, `inner_rows`) / 64      a block has 64, 128 or 256 rows
    elem(bytes)   = bytes / (B e) + t_elem
    linear        = gemm(n, q + 2kv, h) + gemm(n, h, q) + gemm(n, (1+gated)f, h) + gemm(n, h, f)
                  + elem(4hn) norm + elem(4hn) post norm + elem(4(q+kv)n) rotation + elem((6 if gated else 4) fn) act
                  + elem(6hn) residual add, unless fused into the norm + elem(4qn) + elem(4kvn) query and key norms
    allreduce     = of 2nh bytes, two per layer, if T > 1; see `hardware.AllReduce`
    head          = gemm(sampling sequences, V, h)  in 16 bits

Mixture of experts: E (1 - (1 - k/E)^n) experts' weights are read, and k experts' arithmetic is done per token.

The smooth maximum of C, M and I is split between compute, memory and constant in proportion to their squares. Fits have
their constants by type of the weights; I, the time of one block alone, is 0 in those of older engines.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Final, Protocol

from lorrery.worker.device.catalogue.architecture import Model, Precision, Shard
from lorrery.worker.device.catalogue.hardware import SIXTEEN, WEIGHT_TYPES, AllReduce, Gpu, KernelFit
from lorrery.worker.device.deployment import Engine

TILE: Final = 64
"""Rows of attention queries, and of a small matrix product, per block."""
LARGE_ROWS: Final = 256
"""Rows beyond which a matrix product runs in the GPU's larger tiles."""


@dataclass(slots=True, init=False)
class KernelTimes:
    """Sums over kernels, which more kernels can be added to.

    Attributes:
        compute: seconds.
        memory: seconds.
        constant: seconds.
        flops: floating-point operations.
        num_bytes: memory traffic.
    """

    compute: float
    memory: float
    constant: float
    flops: float
    num_bytes: float

    def __init__(
        self,
        compute: float = 0.0,
        memory: float = 0.0,
        constant: float = 0.0,
        flops: float = 0.0,
        num_bytes: float = 0.0,
    ) -> None:
        self.compute = compute
        self.memory = memory
        self.constant = constant
        self.flops = flops
        self.num_bytes = num_bytes

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return self.compute + self.memory + self.constant

    def add(self, other: "KernelTimes", times: int = 1) -> None:
        """Add another sum, `times` over."""
        self.compute += other.compute * times
        self.memory += other.memory * times
        self.constant += other.constant * times
        self.flops += other.flops * times
        self.num_bytes += other.num_bytes * times


class _ProductType:
    """The constants of products in one type of weights, as native figures."""

    __slots__ = (
        "bytes_per_second",
        "columns_start",
        "flops_per_second",
        "inner_rows",
        "inner_seconds",
        "inner_start",
        "least_rows",
        "seconds",
        "tile",
    )

    def __init__(self, gpu: Gpu, fit: KernelFit, weight_type: str, weight_bytes: float) -> None:
        tflops, computed = compute_type(gpu, weight_type)
        unpacked = computed not in WEIGHT_TYPES or (computed == SIXTEEN and weight_type != SIXTEEN)
        of_type = fit.unpacked_gemm(weight_bytes) if unpacked else fit.gemm_of(computed)
        self.flops_per_second = tflops * 1e12 * of_type.flops
        self.bytes_per_second = gpu.gb_per_second * 1e9 * of_type.bandwidth
        self.seconds = of_type.us * 1e-6
        self.inner_seconds = of_type.inner_ns * 1e-9
        self.inner_rows = of_type.inner_rows
        self.tile, self.least_rows = of_type.tile, of_type.least_rows
        self.columns_start, self.inner_start = of_type.columns_start, of_type.inner_start


class Products:
    """Matrix products on one GPU.

    Args:
        gpu: the data sheet.
        fit: its kernels' efficiency against the data sheet.
        factor: duration of the engine's products over those of the fit.
    """

    def __init__(self, gpu: Gpu, fit: KernelFit, factor: float = 1.0) -> None:
        self._gpu, self._fit, self._factor = gpu, fit, factor
        self._types: dict[str, _ProductType] = {}

    def add(
        self,
        times: KernelTimes,
        rows: int,
        columns: int,
        inner: int,
        weight_type: str = SIXTEEN,
        weight_bytes: float = 2.0,
        *,
        read: float = 1.0,
        copies: int = 1,
    ) -> None:
        """Add one product.

        Args:
            times: sums to add it to.
            rows: tokens.
            columns: output elements.
            inner: input elements.
            weight_type: type of the weights, one of `hardware.EXPERT_TYPES`, or `int8`; see `compute_type`.
            weight_bytes: of one weight.
            read: number of weight matrices read.
            copies: number of weight matrices that each row is multiplied with.
        """
        fit = self._types.get(weight_type)
        if fit is None:
            fit = self._types[weight_type] = _ProductType(self._gpu, self._fit, weight_type, weight_bytes)
        tile = fit.least_rows if rows <= TILE else TILE if rows <= LARGE_ROWS else fit.tile
        padded_rows = tile * -(-rows // tile) * copies
        columns_paid, inner_paid = columns + fit.columns_start, inner + fit.inner_start
        compute = 2 * padded_rows * columns_paid * inner_paid / fit.flops_per_second
        num_bytes = weight_bytes * columns * inner * read + 2 * rows * copies * (inner + columns)
        memory = num_bytes / fit.bytes_per_second
        inner_rows = TILE if rows <= TILE else 2 * TILE if rows <= 2 * TILE else 4 * TILE
        chain = fit.inner_seconds * inner * (min(inner_rows, fit.inner_rows) / TILE)
        whole = sqrt(compute * compute + memory * memory + chain * chain)
        times.compute += compute * compute / whole * self._factor
        times.memory += memory * memory / whole * self._factor
        times.constant += (fit.seconds + chain * chain / whole) * self._factor
        times.flops += 2 * rows * copies * columns * inner
        times.num_bytes += num_bytes


def compute_type(gpu: Gpu, weight_type: str) -> tuple[float, str]:
    """Return (peak TFLOPS, type) of the products with weights of one of `hardware.EXPERT_TYPES`.

    Where the GPU has no 8-bit or 4-bit products, such weights are unpacked and multiplied in 16 bits.
    """
    match weight_type:
        case "fp8" | "fp8_block":
            return (gpu.tflops, SIXTEEN) if gpu.fp8_tflops is None else (gpu.fp8_tflops, weight_type)
        case "nvfp4":
            return (gpu.tflops, "int4") if gpu.fp4_tflops is None else (gpu.fp4_tflops, weight_type)
        case _:
            return gpu.tflops, weight_type


class LayerExperts(Protocol):
    """A layer's experts as one kernel, such as `moe.ExpertKernels`."""

    def times(self, num_tokens: int) -> KernelTimes:
        """Return their times for `num_tokens` tokens."""
        ...


class LinearKernels:
    """All kernels of a step except attention, on one GPU.

    Args:
        gpu: the data sheet.
        fit: its kernels' efficiency against the data sheet.
        link: all-reduce over the GPUs.
        model: to serve.
        tensor_parallel: number of GPUs.
        precision: of the weights.
        engine: selects the kernels.
        experts: a mixture's experts; None: they are matrix products like a dense model's.

    Raises:
        CatalogueError: the degree does not divide the model.
    """

    def __init__(
        self,
        gpu: Gpu,
        fit: KernelFit,
        link: AllReduce,
        model: Model,
        tensor_parallel: int,
        shard: Shard,
        precision: Precision,
        engine: Engine,
        experts: LayerExperts | None = None,
    ) -> None:
        self._model, self._shard, self._experts = model, shard, experts
        self._degree, self._link, self._separate_add = tensor_parallel, link, engine.separate_add
        self._query_key_norms = model.query_key_norms and engine.modern
        self._weight_bytes, self._weight_type = precision.weight_bytes, precision.weight_type
        self._ffn_bytes, self._ffn_type = self._weight_bytes, self._weight_type
        if model.num_experts > 1:
            self._ffn_bytes, self._ffn_type = precision.expert_bytes, precision.expert_type
        self._products = Products(gpu, fit, engine.gemm_factor)
        self._all_reduce_factor = engine.all_reduce_factor
        self._elementwise_bytes_per_second = gpu.gb_per_second * 1e9 * fit.elementwise_bandwidth
        self._elementwise_seconds = fit.elementwise_us * 1e-6

    def layer(self, num_tokens: int) -> KernelTimes:
        """Return the times of one layer for `num_tokens` tokens."""
        n, model, shard = num_tokens, self._model, self._shard
        hidden, q, kv, ffn = model.hidden, shard.queries, shard.kv, shard.ffn
        times = KernelTimes()
        self._gemm(times, n, q + 2 * kv, hidden)
        self._gemm(times, n, hidden, q)
        if self._experts is not None:
            self._mixture(times, n, self._experts)
        else:
            self._expert_gemm(times, n, (2 if model.gated else 1) * ffn, hidden)
            self._expert_gemm(times, n, hidden, ffn)
        self._elementwise(times, 4 * hidden * n)
        if self._experts is None:
            self._elementwise(times, (6 if model.gated else 4) * ffn * n * model.experts_per_token)
        if model.post_norm:
            self._elementwise(times, 4 * hidden * n)
        if model.rotary:
            self._elementwise(times, 4 * (q + kv) * n)
        if self._query_key_norms:
            self._elementwise(times, 4 * q * n)
            self._elementwise(times, 4 * kv * n)
        if self._separate_add:
            self._elementwise(times, 6 * hidden * n)
        return times

    def head(self, num_samples: int) -> KernelTimes:
        """Return the times of the language-model head for `num_samples` sequences; zero for none."""
        times = KernelTimes()
        if num_samples:
            self._products.add(times, num_samples, self._shard.vocabulary, self._model.hidden)
        return times

    def all_reduce_seconds(self, num_tokens: int) -> float:
        """Return the seconds of one sum over the replica's GPUs."""
        return self._link.seconds(num_tokens * self._model.hidden * 2, self._degree, self._all_reduce_factor)

    def _gemm(self, times: KernelTimes, rows: int, columns: int, inner: int) -> None:
        self._products.add(times, rows, columns, inner, self._weight_type, self._weight_bytes)

    def _mixture(self, times: KernelTimes, rows: int, experts: LayerExperts) -> None:
        """Add the router in 16 bits, its selection, the selected experts, and the shared experts."""
        model, shared = self._model, self._shard.shared_ffn
        self._products.add(times, rows, model.num_experts, model.hidden)
        self._elementwise(times, 4 * model.num_experts * rows)
        times.add(experts.times(rows))
        if shared:
            self._gemm(times, rows, (2 if model.gated else 1) * shared, model.hidden)
            self._gemm(times, rows, model.hidden, shared)
            self._elementwise(times, (6 if model.gated else 4) * shared * rows)
            self._elementwise(times, 6 * model.hidden * rows)  # added to the others' output

    def _expert_gemm(self, times: KernelTimes, rows: int, columns: int, inner: int) -> None:
        model = self._model
        self._products.add(
            times,
            rows,
            columns,
            inner,
            self._ffn_type,
            self._ffn_bytes,
            read=1.0 if model.num_experts == 1 else model.distinct_experts(rows),
            copies=model.experts_per_token,
        )

    def _elementwise(self, times: KernelTimes, num_bytes: int) -> None:
        times.memory += num_bytes / self._elementwise_bytes_per_second
        times.constant += self._elementwise_seconds
        times.num_bytes += num_bytes
