"""Single kernels, computed by the same code as a step, for comparison with a profile of kernels."""

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.attention import AttentionKernels, Heads
from lorrery.worker.device.batch import PrefillChunk
from lorrery.worker.device.grouped_lora import Slices, grouped_seconds
from lorrery.worker.device.hardware import SIXTEEN, TYPE_BYTES, Gpu
from lorrery.worker.device.kernels import KernelTimes, Products, compute_type
from lorrery.worker.device.moe import SERVED, ExpertKernels, Experts
from lorrery.worker.device.segmented_lora import segmented_seconds

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
