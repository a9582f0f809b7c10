"""What a GPU is to a step-time model: the data sheet, how close kernels come to it, and its links.

GB is 1e9 bytes; TFLOPS are dense, with 32-bit accumulation. The figures and their sources are in `data/gpus.toml`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KernelFit:
    """How close a GPU's kernels come to its data sheet; see `kernels` for the formulas.

    Attributes:
        gemm_flops: share of peak FLOPS in matrix products. Over 1 where the chip boosts beyond its data sheet.
        gemm_bandwidth: share of peak bandwidth in matrix products.
        gemm_us: constant per matrix product.
        elementwise_bandwidth: share of peak bandwidth in elementwise kernels. Over 1 where they hit the L2 cache.
        elementwise_us: constant per elementwise kernel.
        decode_bandwidth: share of peak bandwidth in decode attention.
        prefill_flops: share of peak FLOPS in prefill attention.
        attention_us: constant per attention kernel.
        gemm_tile: rows of one block of a large matrix product.
    """

    gemm_flops: float
    gemm_bandwidth: float
    gemm_us: float
    elementwise_bandwidth: float
    elementwise_us: float
    decode_bandwidth: float
    prefill_flops: float
    attention_us: float
    gemm_tile: int = 64


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
        fit_name: of `fit`, in the catalogue.
        modern_fit: the same with a present-day attention kernel, where `fit` was measured with an older one.
        all_reduce: between the GPUs of one host.
        pair_all_reduce: between two GPUs joined by a bridge, where that is faster.
        pcie_gb_per_second: from pinned host memory, per GPU.
        fp8_tflops: dense 8-bit TFLOPS; None where 8-bit products are not supported.
    """

    name: str
    tflops: float
    memory_gb: float
    gb_per_second: float
    num_sms: int
    fit: KernelFit
    fit_name: str
    modern_fit: KernelFit
    all_reduce: AllReduce
    pair_all_reduce: AllReduce | None = None
    pcie_gb_per_second: float = 24.0
    fp8_tflops: float | None = None

    def link(self, tensor_parallel: int) -> AllReduce:
        """Return what joins the GPUs of one replica."""
        if tensor_parallel == 2 and self.pair_all_reduce is not None:
            return self.pair_all_reduce
        return self.all_reduce

    def with_fit(self, fit: KernelFit) -> "Gpu":
        """Return the same GPU with other kernels."""
        return replace(self, fit=fit, modern_fit=fit)
