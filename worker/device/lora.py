"""Costs of LoRA adapters: memory, loading to the GPU, and time in a step.

A projection from `in` to `out` elements has, at rank r, a matrix A of in x r and a matrix B of r x out. For the
distinct adapters a of a batch with n_a tokens each, per layer and adapted projection:

    bytes  = 2 sum_a r_a (in + out) + 2 sum_a n_a (in + out + 2 r_a)      flops = 2 sum_a n_a r_a (in + out)
    t      = max(flops / (F e), bytes / (B e')) + 2 t_launch              shrink (x A), then expand (B)
    lora   = L * sum over the adapted projections of t;  nothing without adapters

On a mixture of E experts, of which a token uses k, an adapter has A and B for each expert; the router and the experts
that every token uses are projections like others. A step reads those of the experts that an adapter's tokens use (n_a
is taken to be the mean), and has k times as much of all else:

    bytes  = 2 sum_a r_a E (1 - (1 - k/E)^n_a) (in + out) + 2 k sum_a n_a (in + out + 2 r_a)

Grouped and segmented kernels run a pair of launches for gate and up together and one for down; beyond their constants
they are taken to be bounded likewise, which is not measured. vllm-project/vllm (0.32): lora/layers/fused_moe.py.

Kernels that pad replace every r_a by the largest rank: of the batch (S-LoRA's bmm) or that they were built for (vLLM's
max_lora_rank). Tensor parallelism follows the base layer: a column-parallel projection cuts B, a row-parallel one A,
and the partial sums join the base layer's own all-reduce; `sharded` cuts both, and sums the rank-sized product.

These are the bounds by memory and arithmetic. vLLM's and SGLang's kernels take several times as long, bounded by
neither; their formulas are in `grouped_lora` and `segmented_lora`. With tensor parallelism SGLang sums a row-parallel
projection's rank-sized product in an all-reduce of its own.

Loading an adapter, with k copies of `bytes` in total, from host memory, and from disk first if needed, takes:

    t_load = t_request + k * 10 us + bytes / host link + bytes / disk

10 us a copy and 0.3 ms a request are usual costs of asynchronous copies (Punica's paper reports about 2 ms for a 7B
adapter of rank 16 over PCIe 4.0).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import LoraWork
from lorrery.worker.device.catalogue.architecture import Model, check_split, held_experts
from lorrery.worker.device.catalogue.hardware import AllReduce, Gpu
from lorrery.worker.device.lora_kernels import Slices, grouped_seconds, num_segments, segmented_seconds

Targets = Literal["qkvo", "all-linear"]
Kernels = Literal["roofline", "grouped", "segmented"]

FLOPS_SHARE = 0.25
"""Share of peak FLOPS in a shrink or expand kernel, unless an engine says otherwise: small ranks fill few tensor cores.

An assumption.
"""
BANDWIDTH_SHARE = 0.6
"""Share of peak bandwidth, gathered by adapter. An assumption, within the range that Punica and S-LoRA publish."""


@dataclass(frozen=True, slots=True)
class LoraKernels:
    """How an engine computes adapters.

    Attributes:
        targets: adapted projections: the attention's four, or every linear one.
        all_linear: whether every linear projection has places, and kernels run there, whatever the targets; in a
            mixture of experts they do no work without adapters.
        reserved_rank: for which every place has memory set aside; 0: adapters take theirs from the KV pool.
        padding: "none": each adapter at its rank; "batch": at the largest of the batch; a number: at this rank.
        launch_us: per kernel, two kernels per projection. 5 launched one by one, 1 to 2 in a CUDA graph.
        sharded: whether tensor parallelism cuts both matrices.
        kernels: "roofline": time from memory, arithmetic and launches; "grouped": vLLM's, see `grouped_lora`;
            "segmented": SGLang's, see `segmented_lora`. Both ignore `launch_us`.
        places: for adapters on the GPU, which size the grids of grouped kernels; None: as many as a step has adapters.
        pool_rank: for which the pool of adapters has room, at which segmented kernels shrink; at least a step's.
        decode_slots: segments for which segmented kernels' grids have room in a step of decodes alone; 0: none to
            spare.
        prefill_slots: likewise in other steps.
        graphs: whether kernels run in CUDA graphs; without, grids are those of a step's own adapters.
    """

    targets: Targets = "qkvo"
    padding: Literal["none", "batch"] | int = "none"
    launch_us: float = 5.0
    sharded: bool = False
    kernels: Kernels = "roofline"
    places: int | None = None
    pool_rank: int = 0
    decode_slots: int = 0
    prefill_slots: int = 0
    all_linear: bool = False
    reserved_rank: int = 0
    graphs: bool = True

    def reserved_bytes(self, model: Model, tensor_parallel: int, expert_parallel: int) -> int:
        """Return the memory set aside for places, over all GPUs of a replica."""
        if not self.reserved_rank or self.places is None:
            return 0
        targets: Targets = "all-linear" if self.all_linear else self.targets
        rank, sharded = self.reserved_rank, self.sharded
        return self.places * place_bytes(model, rank, targets, tensor_parallel, expert_parallel, sharded=sharded)


REAL_RANKS = LoraKernels()


@dataclass(frozen=True, slots=True)
class Projection:
    """One adapted projection before tensor parallelism.

    Attributes:
        inner: input elements.
        outer: output elements.
        cut_along: the side that tensor parallelism cuts: "column" the outputs, "row" the inputs; "none": neither.
        least_outer: output elements that a GPU has at least: a whole KV head.
        experts: how many of them a layer has, one for each expert; 1: it does not belong to an expert.
    """

    inner: int
    outer: int
    cut_along: Literal["column", "row", "none"]
    least_outer: int = 1
    experts: int = 1

    def cut(self, tensor_parallel: int, expert_parallel: int = 1, *, sharded: bool = False) -> "Cut":
        """Return one GPU's share; `sharded`: both of an adapter's matrices are cut."""
        inner, outer, degree, number = self.inner, self.outer, tensor_parallel, 1
        if self.experts > 1:
            degree, number = tensor_parallel // expert_parallel, held_experts(self.experts, expert_parallel)
        if self.cut_along == "column":
            outer = max(-(-outer // degree), self.least_outer)
            return Cut(inner, outer, (inner // degree if sharded else inner) + outer, number)
        if self.cut_along == "row":
            inner = -(-inner // degree)
            return Cut(inner, outer, inner + (outer // degree if sharded else outer), number)
        return Cut(inner, outer, inner + outer, number)


class Cut(NamedTuple):
    """One GPU's share of a projection.

    Attributes:
        inner: input elements.
        outer: output elements.
        held: elements of A and B per rank.
        number: of such projections: its experts, else 1.
    """

    inner: int
    outer: int
    held: int
    number: int


def projections(model: Model, targets: Targets) -> Sequence[Projection]:
    """Return the adapted projections of one layer; with experts, the router and the shared experts count too."""
    hidden, queries, head = model.hidden, model.num_heads * model.head_size, model.head_size
    key = Projection(hidden, model.num_kv_heads * head, "column", head)
    found = [Projection(hidden, queries, "column"), key, key, Projection(queries, hidden, "row")]
    if targets == "qkvo":
        return found
    shared, experts = model.ffn, model.num_experts
    if experts > 1:
        found.append(Projection(hidden, experts, "none"))
        shared = model.shared_ffn
    for ffn, number in ((shared, 1), *([(model.ffn, experts)] if experts > 1 else [])):
        if ffn:
            found += [Projection(hidden, ffn, "column", experts=number)] * (2 if model.gated else 1)
            found.append(Projection(ffn, hidden, "row", experts=number))
    return found


def adapter_bytes(model: Model, rank: int, targets: Targets = "qkvo") -> int:
    """Return the bytes of one adapter in 16 bits: 2 r L sum(in + out)."""
    return 2 * rank * model.num_layers * sum(p.experts * (p.inner + p.outer) for p in projections(model, targets))


def place_bytes(
    model: Model,
    rank: int,
    targets: Targets,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    *,
    sharded: bool = False,
) -> int:
    """Return the bytes, over all GPUs of a replica, of a place for any adapter up to a rank: what is not cut, each has.

    vllm-project/vllm (0.32): lora/layers (`create_lora_weights`); sgl-project/sglang (0.5.23): srt/lora/mem_pool.py.
    """
    cuts = [p.cut(tensor_parallel, expert_parallel, sharded=sharded) for p in projections(model, targets)]
    return 2 * rank * model.num_layers * tensor_parallel * sum(one.number * one.held for one in cuts)


REQUEST_SECONDS = 300e-6
COPY_SECONDS = 10e-6


def load_ps(
    model: Model,
    size_bytes: float,
    host_gb_per_second: float,
    disk_gb_per_second: float | None = None,
    *,
    copies_per_layer: int = 1,
) -> int:
    """Return the duration of a load in picoseconds.

    Args:
        model: gives the number of copies.
        size_bytes: of the adapter.
        host_gb_per_second: usable rate from pinned host memory: 24 over PCIe 4.0, 50 over 5.0.
        disk_gb_per_second: rate of a preceding read from disk; None: it is in host memory.
        copies_per_layer: 1 if stored in one piece per layer, 8 if A and B of four projections are separate.
    """
    copies = model.num_layers * copies_per_layer
    seconds = REQUEST_SECONDS + copies * COPY_SECONDS + size_bytes / (host_gb_per_second * 1e9)
    if disk_gb_per_second is not None:
        seconds += size_bytes / (disk_gb_per_second * 1e9)
    return round(seconds * PS_PER_SECOND)


class LoraCost:
    """The formulas above for one model on one GPU of a replica.

    Args:
        gpu: of the replica.
        model: whose projections are adapted.
        tensor_parallel: the replica's GPUs.
        kernels: of the engine.
        flops_share: of the roofline.
        link: between the GPUs; None: the GPU's own.
        expert_parallel: groups among which experts are distributed.

    Attributes:
        num_launches: kernels of a layer.
    """

    def __init__(
        self,
        gpu: Gpu,
        model: Model,
        tensor_parallel: int,
        kernels: LoraKernels,
        flops_share: float = FLOPS_SHARE,
        *,
        link: AllReduce | None = None,
        expert_parallel: int = 1,
    ) -> None:
        check_split(model, tensor_parallel, expert_parallel)
        self._layers, self._kernels, self._degree = model.num_layers, kernels, tensor_parallel
        self._flops_per_second = gpu.tflops * 1e12 * flops_share
        self._bytes_per_second = gpu.gb_per_second * 1e9 * BANDWIDTH_SHARE
        self._link = link or gpu.link(tensor_parallel)
        self._fit, self._segmented_fit = gpu.grouped_lora, gpu.segmented_lora
        self._grouped_seconds = lru_cache(maxsize=4096)(self._compute_grouped_seconds)
        self._segmented_seconds = lru_cache(maxsize=4096)(self._compute_segmented_seconds)
        whole = projections(model, "all-linear" if kernels.all_linear and model.num_experts == 1 else kernels.targets)
        cuts = [(p, p.cut(tensor_parallel, expert_parallel, sharded=kernels.sharded)) for p in whole]
        dense = [(p.cut_along, cut) for p, cut in cuts if p.experts == 1]
        self._shapes = [cut for _, cut in dense]
        self._slices = [
            Slices(own[0].inner, sum([one.outer for one in own]), max([one.outer for one in own]), len(own))
            for _, side_by_side in groupby(dense, key=lambda one: one[0])
            if (own := [cut for _, cut in side_by_side])
        ]
        self._num_row_parallel = sum([along == "row" for along, _ in dense])
        self._model = model
        self._expert_shapes = [cut for p, cut in cuts if p.experts > 1]
        pairs = len(self._shapes) if kernels.kernels == "roofline" else len(self._slices)
        self.num_launches = 2 * (pairs + (2 if self._expert_shapes else 0))

    def step(self, work: LoraWork, prefills: bool = False) -> tuple[float, float, float]:
        """Return the step's (seconds, FLOP, bytes); all zero without adapters.

        Args:
            work: of the step.
            prefills: whether it has any.
        """
        if not work.num_adapters:
            return 0.0, 0.0, 0.0
        rank_sum, rank_tokens = self._padded(work)
        kernels = self._kernels.kernels
        seconds = flops = num_bytes = 0.0
        if kernels == "grouped":
            seconds = self._grouped_seconds(work.num_tokens, work.num_adapters, work.max_rank)
        elif kernels == "segmented":
            mean_rank = -(-rank_tokens // max(work.num_tokens, 1))
            slots = self._kernels.prefill_slots if prefills else self._kernels.decode_slots
            seconds = self._segmented_seconds(work.num_tokens, work.num_adapters, work.max_rank, mean_rank, slots)
        for inner, outer, held, _ in self._shapes:
            kernel_bytes = 2 * rank_sum * held + 2 * (work.num_tokens * (inner + outer) + 2 * rank_tokens)
            kernel_flops = 2 * rank_tokens * held
            if kernels == "roofline":
                kernel_seconds = max(kernel_flops / self._flops_per_second, kernel_bytes / self._bytes_per_second)
                seconds += kernel_seconds + 2 * self._kernels.launch_us * 1e-6
            flops += kernel_flops
            num_bytes += kernel_bytes
            if self._kernels.sharded and self._degree > 1:
                seconds += self._link.seconds(rank_tokens * 2, self._degree)
        if self._expert_shapes:
            of_experts = self._experts(work, rank_sum, rank_tokens)
            seconds, flops, num_bytes = seconds + of_experts[0], flops + of_experts[1], num_bytes + of_experts[2]
        return self._layers * seconds, self._layers * flops, self._layers * num_bytes

    def _experts(self, work: LoraWork, rank_sum: int, rank_tokens: int) -> tuple[float, float, float]:
        """Return one layer's (seconds, FLOP, bytes) of adapters on experts."""
        model, kernels = self._model, self._kernels
        share_used = model.distinct_experts(work.num_tokens / work.num_adapters) / model.num_experts
        pair_us = {"grouped": self._fit.us, "segmented": self._segmented_fit.us}.get(kernels.kernels)
        us = 2 * kernels.launch_us * len(self._expert_shapes) if pair_us is None else 2 * pair_us
        seconds, flops, num_bytes = us * 1e-6, 0.0, 0.0
        for inner, outer, held, number in self._expert_shapes:
            per_token = model.experts_per_token * number / model.num_experts
            kernel_bytes = 2 * rank_sum * number * share_used * held
            kernel_bytes += 2 * per_token * (work.num_tokens * (inner + outer) + 2 * rank_tokens)
            kernel_flops = 2 * per_token * rank_tokens * held
            seconds += max(kernel_flops / self._flops_per_second, kernel_bytes / self._bytes_per_second)
            flops += kernel_flops
            num_bytes += kernel_bytes
        return seconds, flops, num_bytes

    def _compute_grouped_seconds(self, num_tokens: int, num_adapters: int, max_rank: int) -> float:
        """Return the seconds of one layer; tokens without an adapter are not counted into the grids."""
        kernels = self._kernels
        padding, places = kernels.padding, kernels.places if kernels.graphs and kernels.places else num_adapters
        rank = max_rank if isinstance(padding, str) else max(padding, max_rank)
        return sum(
            grouped_seconds(self._fit, slices, num_tokens, num_adapters, places, rank) for slices in self._slices
        )

    def _compute_segmented_seconds(
        self, num_tokens: int, num_adapters: int, max_rank: int, mean_rank: int, slots: int
    ) -> float:
        """Return the seconds of one layer, and of the all-reduces that it needs; mean_rank: over tokens, rounded up."""
        rank, segments = max(self._kernels.pool_rank, max_rank), num_segments(num_tokens, num_adapters)
        seconds = sum(
            segmented_seconds(self._segmented_fit, slices, num_tokens, segments, slots, rank, mean_rank)
            for slices in self._slices
        )
        if self._degree > 1 and not self._kernels.sharded:
            seconds += self._num_row_parallel * self._link.seconds(num_tokens * rank * 2, self._degree)
        return seconds

    def _padded(self, work: LoraWork) -> tuple[int, int]:
        """Return the sums of ranks over adapters and over tokens, as the kernels see them."""
        padding = self._kernels.padding
        if padding == "none":
            return work.rank_sum, work.rank_tokens
        rank = work.max_rank if padding == "batch" else max(padding, work.max_rank)
        return work.num_adapters * rank, work.num_tokens * rank
