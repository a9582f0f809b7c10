"""A GPU as a step-time model sees it: the data sheet, its kernels' efficiency against it, and its links.

GB is 1e9 bytes; TFLOPS are dense, with 32-bit accumulation. The figures and their sources are in `data/gpus.toml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal


class CatalogueError(ValueError):
    """An unknown GPU, model or engine, or a combination that does not work; the message says what would."""


Basis = Literal["measured", "fitted", "assumed"]
"""Basis of a figure: measured directly, fitted to measurements, or neither."""
SIXTEEN = "bf16"
"""The type whose constants every fit has; they also stand in for missing types."""
WEIGHT_TYPES = (SIXTEEN, "fp8", "fp8_block", "nvfp4")
"""Types of matrix products: 16 bits; 8 bits with one scale per tensor; 8 bits with one per 128 x 128 block; 4 bits with
one per 16 weights."""
EXPERT_TYPES = (*WEIGHT_TYPES, "mxfp4", "int4")
"""Types of experts: also 4 bits that are unpacked and multiplied in 16, of floating point (a scale per 32 weights) and
of integers (Marlin's kernel)."""
MARLIN = "mxfp4_marlin"
MOE_TYPES = (*EXPERT_TYPES, MARLIN)
"""Tables of experts' constants: by type, and for `mxfp4` in Marlin's kernel, which vLLM runs if it is told to."""
TYPE_BYTES: Mapping[str, float] = {
    SIXTEEN: 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 2.5 / 128,
}
"""Type -> bytes of a weight, with its scales where those count."""
KV_TYPES = (SIXTEEN, "fp8")
SINKS = "sinks"
"""Attention with sinks, where the engine has another kernel for it: vLLM's Triton kernel on GPUs before Hopper."""
ATTENTION_TYPES = (*KV_TYPES, SINKS)
"""Tables of attention's constants."""
UNPACKED_FLOPS = {4: 0.56, 8: 0.49}
"""Bits of weights -> share of 16-bit products' FLOPS that products reach which unpack them (Marlin's kernel). Fitted to
four runs on A100 that users posted (docs/validation.md)."""
UNPACKED_ROWS = 16
"""Rows of their smallest block."""
PEER_BYTES = 256 * 1024
"""Message size from which an all-reduce pays its full cost per further GPU."""
LARGE_BYTES = 16 * 1024 * 1024
"""Message size from which an all-reduce pays its full cost for large messages."""


@dataclass(frozen=True, slots=True)
class GemmFit:
    """Matrix products in one type of weights.

    Attributes:
        flops: share of the type's peak FLOPS. Over 1 where the chip boosts beyond its data sheet.
        bandwidth: share of peak bandwidth.
        us: constant per product.
        tile: rows of one block of a large product.
        least_rows: rows of the smallest block of a small one.
        inner_ns: time of a block of 64 rows per inner element, however few blocks there are.
        inner_rows: rows beyond which a block's inner element takes no longer.
        columns_start: extra columns that a product's arithmetic counts.
        inner_start: likewise in inner elements: a block's overhead before its first and after its last.
        launch_us: CPU time of a product launched by itself, not from a CUDA graph; no step includes it.
    """

    flops: float
    bandwidth: float
    us: float
    tile: int = 64
    least_rows: int = 64
    inner_ns: float = 0.0
    inner_rows: int = 64
    columns_start: float = 0.0
    inner_start: float = 0.0
    launch_us: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """Attention over a KV cache of one type; see `attention` for the formulas.

    Attributes:
        decode_bandwidth: share of peak bandwidth in decode attention.
        prefill_flops: share of peak FLOPS in prefill attention.
        decode_us: constant per decode kernel.
        prefill_us: constant per prefill kernel.
        sequence_ns: added to decode attention for each sequence and KV head.
        longest_ns: added to it for each token of the longest sequence.
        store_bandwidth: share of peak bandwidth at which a prefill's keys and values are stored in the cache; 0: no
            time.
        tile: query rows of one tile of prefill attention.
        tile_start: overhead of such a tile before its first KV token, in KV tokens.
        overlap: exponent by which the longest tile adds to the tiles' sum; 0 for tiles that run in whole waves.
    """

    decode_bandwidth: float
    prefill_flops: float
    decode_us: float
    prefill_us: float
    sequence_ns: float = 0.0
    longest_ns: float = 0.0
    store_bandwidth: float = 0.0
    tile: int = 64
    tile_start: float = 100.0
    overlap: float = 0.0


@dataclass(frozen=True, slots=True)
class MoeFit:
    """A layer's experts in one type of weights; see `moe` for the formulas.

    Attributes:
        flops: share of the type's peak FLOPS.
        bandwidth: share of peak bandwidth at which weights are read.
        us: constant per layer.
        expert_rows: mean padding of each expert's rows.
        activation_bandwidth: share of peak bandwidth in permutation and activation.
        all_pairs: share of permutation and activation that every GPU does for all experts, not just its own.
        expert_us: added for each expert that is read.
    """

    flops: float
    bandwidth: float
    us: float
    expert_rows: float
    activation_bandwidth: float
    all_pairs: float = 0.0
    expert_us: float = 0.0


@dataclass(frozen=True, slots=True)
class LoraFit:
    """Grouped LoRA kernels; see `grouped_lora` for the formula.

    Attributes:
        us: constant per pair of launches.
        step_us: for each step of a shrink program, one after another.
        shrink_ns: for each step of each shrink program.
        expand_ns: for each expand program.
        idle_ns: for each program without work.
        slice_ns: for each program at work where a layer has several slices.
    """

    us: float
    step_us: float
    shrink_ns: float
    expand_ns: float
    idle_ns: float
    slice_ns: float


@dataclass(frozen=True, slots=True)
class SegmentedLoraFit:
    """Segmented LoRA kernels; see `segmented_lora` for the formula.

    Attributes:
        us: constant per pair of launches.
        step_us: for each step of a shrink program, one after another.
        shrink_ns: for each step of each shrink program.
        expand_ns: for each block of each expand program.
        token_ns: for each token and tile of the output.
        idle_ns: for each program without work.
    """

    us: float
    step_us: float
    shrink_ns: float
    expand_ns: float
    token_ns: float
    idle_ns: float


_HOPPER_LORA = LoraFit(us=2.45, step_us=0.706, shrink_ns=0.277, expand_ns=10.8, idle_ns=0.631, slice_ns=6.1)
"""Of H100 and H200, which have similar ones, as they have the same number of SMs: for any other GPU see `_on_sms`."""
_HOPPER_SEGMENTED = SegmentedLoraFit(
    us=6.13, step_us=0.539, shrink_ns=1.37, expand_ns=2.21, token_ns=0.351, idle_ns=0.546
)
"""Likewise."""
_HOPPER_SMS = 132


@dataclass(frozen=True, slots=True)
class KernelFit:
    """Efficiency of a GPU's kernels against its data sheet; see `kernels` and `attention` for the formulas.

    Attributes:
        elementwise_bandwidth: share of peak bandwidth in elementwise kernels. Over 1 where they hit the L2 cache.
        elementwise_us: constant per elementwise kernel.
        gemm: matrix products by type of the weights, one of `WEIGHT_TYPES`; 16 bits are always present.
        attention: attention by type of the KV cache, or with sinks, one of `ATTENTION_TYPES`; 16 bits are always
            present.
        moe: experts by type of the weights; empty if unknown: they are then computed as products.
        lora: grouped LoRA kernels, in 16 bits; None if unknown.
        lora_segmented: segmented ones, likewise.
        basis: of the constants.
        source: of the constants.
        gpus: names of the measured GPUs; on others the constants are assumed to hold.
        assumed: parts without a measurement all the same: `gemm`, `attention`, `elementwise`, `moe`, `lora`,
            `lora_segmented`.
    """

    elementwise_bandwidth: float
    elementwise_us: float
    gemm: Mapping[str, GemmFit] = field(hash=False)
    attention: Mapping[str, AttentionFit] = field(hash=False)
    moe: Mapping[str, MoeFit] = field(default_factory=dict, hash=False)
    lora: LoraFit | None = None
    lora_segmented: SegmentedLoraFit | None = None
    basis: Basis = "fitted"
    source: str = ""
    gpus: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def gemm_of(self, weight_type: str) -> GemmFit:
        """Return the constants of products in that type: those of 16 bits if it has none."""
        return self.gemm.get(weight_type) or self.gemm[SIXTEEN]

    def unpacked_gemm(self, weight_bytes: float) -> GemmFit:
        """Return the constants of products in 16 bits whose weights have fewer, and are unpacked as they are read."""
        sixteen = self.gemm[SIXTEEN]
        flops = sixteen.flops * UNPACKED_FLOPS[8 if weight_bytes >= 1 else 4]
        return replace(sixteen, flops=flops, least_rows=UNPACKED_ROWS)

    def attention_of(self, kv_type: str, *, sinks: bool = False) -> AttentionFit:
        """Return the constants of attention over a cache of that type: those of 16 bits if it has none.

        Args:
            kv_type: of the cache.
            sinks: whether attention has sinks; without constants of their own it takes as long as others.
        """
        own = self.attention.get(SINKS) if sinks else None
        return own or self.attention.get(kv_type) or self.attention[SIXTEEN]

    def moe_of(self, weight_type: str) -> MoeFit | None:
        """Return the constants of experts in that type: those of 16 bits if it has none; None: neither."""
        return self.moe.get(weight_type) or self.moe.get(SIXTEEN)

    @classmethod
    def of_constants(cls, constants: Mapping[str, float], basis: Basis = "fitted", source: str = "") -> "KernelFit":
        """Build the fit of one set of constants for all types, by the names of `constants`.

        Raises:
            KeyError: a constant is missing.
        """
        c = constants
        return cls(
            elementwise_bandwidth=c["elementwise_bandwidth"],
            elementwise_us=c["elementwise_us"],
            gemm={SIXTEEN: GemmFit(c["gemm_flops"], c["gemm_bandwidth"], c["gemm_us"], int(c.get("gemm_tile", 64)))},
            attention={
                SIXTEEN: AttentionFit(c["decode_bandwidth"], c["prefill_flops"], c["attention_us"], c["attention_us"])
            },
            basis=basis,
            source=source,
        )

    @property
    def constants(self) -> dict[str, float]:
        """The constants of 16 bits, under the names with which a table gives them for all types at once."""
        gemm, attention = self.gemm[SIXTEEN], self.attention[SIXTEEN]
        return {
            "gemm_flops": gemm.flops,
            "gemm_bandwidth": gemm.bandwidth,
            "gemm_us": gemm.us,
            "elementwise_bandwidth": self.elementwise_bandwidth,
            "elementwise_us": self.elementwise_us,
            "decode_bandwidth": attention.decode_bandwidth,
            "prefill_flops": attention.prefill_flops,
            "attention_us": attention.decode_us,
            "gemm_tile": gemm.tile,
        }


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Cost of summing over the GPUs of one replica.

    Of s bytes over T GPUs:

        us + us_per_gpu (T - 2) min(1, s / 256 KiB) + large_us min(1, s / 16 MiB) + 2 (T - 1) / T s / gb_per_second

    Attributes:
        us: to start.
        gb_per_second: bus bandwidth: the ring's bytes per second.
        us_per_gpu: for each GPU beyond two, in a message that is not small.
        large_us: for a large message, which another kernel handles.
        by_degree: (GPUs, bus bandwidth) where it differs, ascending; other numbers use the next smaller.
        basis: of the figures.
        source: of the figures.
        gpus: names of the GPUs that were measured; on others the figures are assumed to hold. Empty: unknown.
        degrees: measured numbers of GPUs, ascending; on others the figures are assumed to hold. Empty: unknown.
    """

    us: float
    gb_per_second: float
    us_per_gpu: float = 0.0
    large_us: float = 0.0
    by_degree: tuple[tuple[int, float], ...] = ()
    basis: Basis = "fitted"
    source: str = ""
    gpus: tuple[str, ...] = ()
    degrees: tuple[int, ...] = ()

    def bandwidth(self, num_gpus: int) -> float:
        """Return the bus bandwidth over `num_gpus` GPUs, in GB/s."""
        found = self.gb_per_second
        for degree, bandwidth in self.by_degree:
            if degree <= num_gpus:
                found = bandwidth
        return found

    def seconds(self, num_bytes: float, num_gpus: int, factor: float = 1.0) -> float:
        """Return the seconds of one sum; 0 on one GPU.

        Args:
            num_bytes: on each GPU.
            num_gpus: number of GPUs.
            factor: on the part of the time that does not depend on the ring's bytes.
        """
        if num_gpus == 1:
            return 0.0
        ring_bytes = 2 * (num_gpus - 1) / num_gpus * num_bytes
        us = self.us + self.us_per_gpu * (num_gpus - 2) * min(1.0, num_bytes / PEER_BYTES)
        us += self.large_us * min(1.0, num_bytes / LARGE_BYTES)
        return us * factor * 1e-6 + ring_bytes / (self.bandwidth(num_gpus) * 1e9)


@dataclass(frozen=True, slots=True)
class Price:
    """What a GPU costs.

    Attributes:
        usd_per_hour: of one GPU, with its share of the host.
        source: whose price.
        date: of the price list.
    """

    usd_per_hour: float
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as settings spell it.
        tflops: dense 16-bit TFLOPS.
        memory_gb: device memory according to the label.
        gb_per_second: memory bandwidth.
        num_sms: streaming multiprocessors.
        fit: efficiency of its kernels; of an older engine's, where those were measured.
        fit_name: of `fit`, in the catalogue.
        modern_fit: efficiency of a present-day engine's kernels.
        modern_fit_name: of `modern_fit`, in the catalogue.
        all_reduce: between the GPUs of one host, by the vendor's library.
        pair_all_reduce: between two GPUs joined by a bridge, if that is faster.
        modern_all_reduce: a present-day engine's own, inside a CUDA graph; None if it uses the library's.
        host_all_reduce: where the GPUs cannot reach each other's memory, through the CPUs'; None if unknown.
        pcie_gb_per_second: from pinned host memory, per GPU.
        fp8_tflops: dense 8-bit TFLOPS; None where 8-bit products are not supported.
        fp4_tflops: dense 4-bit TFLOPS; None where 4-bit products are not supported.
        usable_memory_gb: as reported by the device; None if unknown.
        watts: of the board at most; None if unknown.
    """

    name: str
    tflops: float
    memory_gb: float
    gb_per_second: float
    num_sms: int
    fit: KernelFit
    fit_name: str
    modern_fit: KernelFit
    modern_fit_name: str
    all_reduce: AllReduce
    pair_all_reduce: AllReduce | None = None
    modern_all_reduce: AllReduce | None = None
    host_all_reduce: AllReduce | None = None
    pcie_gb_per_second: float = 24.0
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    usable_memory_gb: float | None = None
    watts: float | None = None

    def kernels(self, *, modern: bool) -> KernelFit:
        """Return the efficiency of its kernels: an older engine's, or a present-day one's."""
        return self.modern_fit if modern else self.fit

    def link(self, tensor_parallel: int, *, modern: bool = False, peer_to_peer: bool = True) -> AllReduce:
        """Return the all-reduce of one replica, for an older engine or a present-day one.

        Args:
            tensor_parallel: number of GPUs.
            modern: whether the engine is a present-day one.
            peer_to_peer: whether the GPUs reach each other's memory.
        """
        if not peer_to_peer and self.host_all_reduce is not None:
            return self.host_all_reduce
        if modern and self.modern_all_reduce is not None:
            return self.modern_all_reduce
        if tensor_parallel == 2 and self.pair_all_reduce is not None:
            return self.pair_all_reduce
        return self.all_reduce

    @property
    def grouped_lora(self) -> LoraFit:
        """The constants of grouped LoRA kernels: those of Hopper GPUs on its own SMs if it has none."""
        return self.modern_fit.lora or replace(_HOPPER_LORA, **self._on_sms(_HOPPER_LORA))

    @property
    def segmented_lora(self) -> SegmentedLoraFit:
        """The constants of segmented LoRA kernels, likewise."""
        return self.modern_fit.lora_segmented or replace(_HOPPER_SEGMENTED, **self._on_sms(_HOPPER_SEGMENTED))

    def _on_sms(self, hopper: LoraFit | SegmentedLoraFit) -> dict[str, float]:
        """Return a Hopper GPU's times per program, in inverse proportion to the number of SMs that run them."""
        names = [one.name for one in fields(hopper) if one.name.endswith("_ns")]
        return {name: getattr(hopper, name) * _HOPPER_SMS / self.num_sms for name in names}

    def with_fit(self, fit: KernelFit) -> "Gpu":
        """Return the same GPU with other kernels."""
        return replace(self, fit=fit, modern_fit=fit)
