"""Step time from first principles: every kernel takes as long as its arithmetic and its memory traffic.

Fitted to published kernel measurements (see `catalogue`). For a model with L layers, hidden size h, q query and kv KV
heads of size d, feed-forward size f, cut over T GPUs (q/T, max(kv/T, 1), f/T, V/T below); a GPU with F FLOPS, B bytes
per second, S SMs; a batch in which sequence i computes c_i tokens after p_i cached ones, n = sum c_i:

    gemm(n, N, K) = sqrt(C^2 + M^2) + t_gemm        C = 2 * 64 ceil(n/64) N K / (F e)   M = (2NK + 2nK + 2nN) / (B e)
    elem(bytes)   = bytes / (B e) + t_elem
    linear        = gemm(n, (q+2kv)d, h) + gemm(n, h, qd) + gemm(n, (1+gated)f, h) + gemm(n, h, f)
                  + elem(4hn) norm + elem(4hn) post norm + elem(4(q+kv)dn) rotation + elem((6 if gated else 4) fn) act
                  + elem(6hn) residual add, unless fused into the norm
    attention     = attn_prefill(chunks) + attn_decode(decodes)                        two kernels, each if it has work
    attn_decode   = sum_i p_i * kv * d * 4 / (B e) + t_attn
    attn_prefill  = tau * waves + t_attn            tau = 4 * 64 d S / (F e), the time per KV token of one 64-row tile
    waves         = tiles, longest first, run S at a time; each wave lasts as long as its longest tile. Sequence i has
                    ceil(c_i/64) q tiles of length p_i + c_i/2 + 132
    allreduce     = alpha + 2 (T-1)/T * 2nh / bus   two per layer, if T > 1
    gpu step      = L (linear + attention + 2 allreduce) + head               head = gemm(sampling sequences, V, h)
    step          = max(gpu step, L t_launch) + c0 + c1 * sampling sequences + c_prefill if there is any prefill

Mixture of experts: min(E, E (1 - (1 - k/E)^n)) experts' weights are read, and k experts' arithmetic is done per token.

Integer arithmetic: three coefficients are rounded to picoseconds once: what depends on (n, samples) alone, the time per
decode KV token, and the time per half token of prefill tile length.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import hypot

from worker.device.batch import Batch, PrefillChunk, Segment
from worker.device.catalogue import AllReduce, Gpu, Model, check_split

_PS_PER_SECOND = 10**12
_PS_PER_MS = 10**9

TILE = 64
"""Rows of a matrix product or of attention queries that one block computes."""
TILE_OFFSET_TOKENS = 132
"""Half a tile, and what an attention tile costs before its first KV token (100; 60 to 140 fit alike)."""


@dataclass(frozen=True, slots=True)
class HostCost:
    """What the CPU adds to a step, in ms: launches per layer (a floor), per step, per sequence, for any prefill."""

    launch_ms: float
    step_ms: float
    sequence_ms: float
    prefill_ms: float


HOSTS: Mapping[str, HostCost] = {
    # An engine of today with CUDA graphs and asynchronous scheduling. An assumption, not a measurement.
    "present-day": HostCost(0.0, 2.0, 0.02, 0.0),
    # vLLM of late 2023, fitted to Splitwise's published end-to-end times.
    "vllm-2023-a100": HostCost(0.540, 1.0, 0.39, 16.5),
    "vllm-2023-h100": HostCost(0.326, 4.3, 0.31, 15.4),
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels an engine runs: whether the residual add is one of its own, and whether the head is counted."""

    separate_add: bool = False
    head: bool = True


class Roofline:
    """The formulas above for one model on `tensor_parallel` GPUs.

    Raises:
        CatalogueError: the degree does not divide the model.
    """

    name = "roofline"

    def __init__(
        self,
        gpu: Gpu,
        model: Model,
        tensor_parallel: int = 1,
        *,
        host: HostCost = HOSTS["present-day"],
        kernels: Kernels = Kernels(),
    ) -> None:
        check_split(model, tensor_parallel)
        self._gpu, self._model, self._degree, self._kernels = gpu, model, tensor_parallel, kernels
        self._flops, self._bytes_per_second = gpu.tflops * 1e12, gpu.gb_per_second * 1e9
        self._q = model.num_heads // tensor_parallel
        self._kv = max(model.num_kv_heads // tensor_parallel, 1)
        self._ffn = model.ffn // tensor_parallel
        self._vocabulary = -(-model.vocabulary // tensor_parallel)

        fit, layers, head_size = gpu.fit, model.num_layers, model.head_size
        self._launch_ps = round(layers * host.launch_ms * _PS_PER_MS)
        self._host_step_ps = round(host.step_ms * _PS_PER_MS)
        self._host_sequence_ps = round(host.sequence_ms * _PS_PER_MS)
        self._host_prefill_ps = round(host.prefill_ms * _PS_PER_MS)
        self._attention_ps = round(layers * fit.attention_us * 1e6)
        kv_bytes = self._kv * head_size * 2 * 2
        self._kv_token_ps = _ps(layers * kv_bytes / (self._bytes_per_second * fit.decode_bandwidth))
        tile_flops = 4 * TILE * head_size * gpu.num_sms
        self._half_tile_token_ps = _ps(layers * tile_flops / (self._flops * fit.prefill_flops) / 2)
        # The same few sizes come again step after step.
        self._size_ps = lru_cache(maxsize=4096)(self._compute_size_ps)

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration; the host's share alone if the batch is empty."""
        num_samples = batch.num_decodes + sum(chunk.samples for chunk in batch.prefills)
        host_ps = self._host_step_ps + self._host_sequence_ps * num_samples
        if batch.prefills:
            host_ps += self._host_prefill_ps
        return max(self.gpu_step_ps(batch), self._launch_ps) + host_ps

    def gpu_step_ps(self, batch: Batch) -> int:
        """Return the time the GPU is busy with the step; 0 if the batch is empty."""
        num_tokens, num_samples, gpu_ps = batch.num_decodes, batch.num_decodes, 0
        if batch.num_decodes:
            gpu_ps += batch.decode_kv_tokens * self._kv_token_ps + self._attention_ps
        if batch.prefills:
            for chunk in batch.prefills:
                num_tokens += chunk.new_tokens
                num_samples += chunk.samples
            half_tokens = prefill_waves(batch.prefills, self._q, self._gpu.num_sms)
            gpu_ps += half_tokens * self._half_tile_token_ps + self._attention_ps
        return gpu_ps + self._size_ps(num_tokens, num_samples) if num_tokens else 0

    def decode_segment(self, num_decodes: int, kv_tokens: int, max_kv_tokens: int) -> Segment | None:
        """Return the times of consecutive decode steps, unless kernel launches bound the first of them."""
        del max_kv_tokens  # the kernel splits long sequences: only the sum counts
        batch = Batch((), num_decodes, kv_tokens)
        if num_decodes and self.gpu_step_ps(batch) < self._launch_ps:
            return None  # a kink lies ahead, where the GPU becomes the slower one
        return Segment(self.step_ps(batch), num_decodes * self._kv_token_ps)

    def _compute_size_ps(self, num_tokens: int, num_samples: int) -> int:
        """Everything that depends on the counts of tokens and samples alone: linear layers, all-reduces, head."""
        layer = self._linear_seconds(num_tokens) + 2 * self._all_reduce_seconds(num_tokens)
        head = 0.0
        if self._kernels.head and num_samples:
            head = self._gemm_seconds(num_samples, self._vocabulary, self._model.hidden)
        return _ps(self._model.num_layers * layer + head)

    def _linear_seconds(self, n: int) -> float:
        model, kernels = self._model, self._kernels
        hidden, qd, kvd = model.hidden, self._q * model.head_size, self._kv * model.head_size
        experts = model.experts_per_token
        seconds = self._gemm_seconds(n, qd + 2 * kvd, hidden) + self._gemm_seconds(n, hidden, qd)
        seconds += self._expert_gemm_seconds(n, (2 if model.gated else 1) * self._ffn, hidden)
        seconds += self._expert_gemm_seconds(n, hidden, self._ffn)
        seconds += self._elementwise_seconds(4 * hidden * n)
        seconds += self._elementwise_seconds((6 if model.gated else 4) * self._ffn * n * experts)
        if model.post_norm:
            seconds += self._elementwise_seconds(4 * hidden * n)
        if model.rotary:
            seconds += self._elementwise_seconds(4 * (qd + kvd) * n)
        if kernels.separate_add:
            seconds += self._elementwise_seconds(6 * hidden * n)
        return seconds

    def _gemm_seconds(self, rows: int, columns: int, inner: int, experts_read: float = 1.0, copies: int = 1) -> float:
        fit = self._gpu.fit
        padded_rows = TILE * -(-rows // TILE) * copies
        compute = 2 * padded_rows * columns * inner / (self._flops * fit.gemm_flops)
        num_bytes = 2 * columns * inner * experts_read + 2 * rows * copies * (inner + columns)
        memory = num_bytes / (self._bytes_per_second * fit.gemm_bandwidth)
        return hypot(compute, memory) + fit.gemm_us * 1e-6

    def _expert_gemm_seconds(self, rows: int, columns: int, inner: int) -> float:
        experts, used = self._model.num_experts, self._model.experts_per_token
        if experts == 1:
            return self._gemm_seconds(rows, columns, inner)
        distinct = experts * (1 - (1 - used / experts) ** rows)
        return self._gemm_seconds(rows, columns, inner, distinct, used)

    def _elementwise_seconds(self, num_bytes: int) -> float:
        fit = self._gpu.fit
        return num_bytes / (self._bytes_per_second * fit.elementwise_bandwidth) + fit.elementwise_us * 1e-6

    def _all_reduce_seconds(self, n: int) -> float:
        degree = self._degree
        if degree == 1:
            return 0.0
        link: AllReduce = self._gpu.all_reduce
        if degree == 2 and self._gpu.pair_all_reduce is not None:
            link = self._gpu.pair_all_reduce
        ring_bytes = 2 * (degree - 1) / degree * n * self._model.hidden * 2
        return link.us * 1e-6 + ring_bytes / (link.gb_per_second * 1e9)


def prefill_waves(chunks: Iterable[PrefillChunk], num_heads: int, num_sms: int) -> int:
    """Return how long prefill attention keeps the GPU, in half tokens of tile length.

    Monotone in every argument but `num_sms`: a further chunk, a longer chunk or more context never shortens it.

    Args:
        chunks: the step's prompt chunks.
        num_heads: query heads on this GPU.
        num_sms: tiles that run at once.
    """
    tiles = sorted(
        (
            (2 * (chunk.past_tokens + TILE_OFFSET_TOKENS) + chunk.new_tokens, -(-chunk.new_tokens // TILE) * num_heads)
            for chunk in chunks
        ),
        reverse=True,
    )
    total = first = 0
    for half_length, count in tiles:
        # Waves begin at tiles 0, S, 2S, ...: how many of those lie in [first, first + count)?
        total += half_length * (-(-(first + count) // num_sms) - -(-first // num_sms))
        first += count
    return total


def _ps(seconds: float) -> int:
    return round(seconds * _PS_PER_SECOND)
