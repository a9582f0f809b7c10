"""Time of the attention kernels of a step, over all layers, in whole picoseconds.

A GPU with S SMs runs S tiles at a time; a tile is r query rows of one head. Sequence i computes c_i tokens after p_i
cached ones, with q query heads and kv KV heads of d elements on this GPU, an element of the cache taking a bytes:

    attn_decode  = sum_i p_i * kv * d * 2a / (B e) + t_sequence * kv * sequences + t_longest * max_i p_i + t_decode
    attn_prefill = tau * (total^x + longest^x)^(1/x) + sum_i c_i * kv * d * 4 / (B e_store) + t_prefill
    tau          = 4 r d S / (F e): the time per KV token of one tile, when all SMs are busy
    total        = sum of the tiles' lengths / S      sequence i has ceil(c_i/r) q tiles of mean length p_i + c_i/2 + s
    longest      = p_i + c_i + s, of the sequence where that is most: tiles go to SMs as these get free, and one is last
    split        = attn_prefill(prefills) + attn_decode(decodes)                two kernels, each if it has work
    unified      = max(attn_prefill, attn_decode), each without its t, + the larger t      one kernel for both

Older fits have no exponent x; for those tiles of 64 rows run in whole waves:

    attn_prefill = tau * waves + t_attn
    waves        = tiles, longest first, S at a time; each wave lasts as long as its longest tile. Sequence i has
                   ceil(c_i/64) q tiles of length p_i + c_i/2 + 132
    unified      = max(tau * waves, decodes' KV bytes / (B e)) + t_attn       a decode has q tiles of one row and of
                   length p_i + 100

In a layer with a window of w tokens, a decode reads w tokens whatever its length, and a tile w of those before it at
most. The tiles' sum and the longest tile are then means over layers. (Older fits compute tiles in full.)

Integer arithmetic: times per decode KV token, per sequence and per token of the longest are rounded once, and so is the
prefill time of a step.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.catalogue.architecture import Model, Precision, Shard
from lorrery.worker.device.catalogue.hardware import SIXTEEN, Gpu, KernelFit
from lorrery.worker.device.deployment import KERNELS_ONLY, Engine
from lorrery.worker.device.kernels import TILE

TILE_START_TOKENS: Final = 100
"""Cost of a tile in a wave before its first KV token; 60 to 140 fit equally well."""


@dataclass(frozen=True, slots=True)
class Heads:
    """One GPU's heads and its KV cache.

    Attributes:
        query: query heads.
        kv: KV heads.
        size: elements per head.
        kv_bytes: of an element of the cache.
        kv_type: one of `hardware.KV_TYPES`.
        sinks: whether each attends to a sink too.
    """

    query: int
    kv: int
    size: int
    kv_bytes: int
    kv_type: str
    sinks: bool = False

    @classmethod
    def of(cls, model: Model, shard: Shard, precision: Precision) -> "Heads":
        """Return a shard's heads."""
        size = model.head_size
        return cls(
            shard.queries // size, shard.kv // size, size, precision.kv_bytes, precision.kv_type, model.attention_sinks
        )


class AttentionKernels:
    """The formulas above for one GPU.

    Args:
        gpu: the data sheet.
        fit: its kernels' efficiency against the data sheet.
        heads: its share of the model.
        num_layers: number of layers to sum over.
        engine: selects the kernels.
        window_layers: those of them that have a window.
        window: its tokens.
    """

    def __init__(
        self,
        gpu: Gpu,
        fit: KernelFit,
        heads: Heads,
        num_layers: int = 1,
        engine: Engine = KERNELS_ONLY,
        window_layers: int = 0,
        window: int = 0,
    ) -> None:
        constants = fit.attention_of(heads.kv_type, sinks=heads.sinks)
        layers, self._num_sms, self._unified = num_layers, gpu.num_sms, engine.attention == "unified"
        decode = engine.decode_factor if heads.kv_type == SIXTEEN else engine.fp8_decode_factor
        prefill = engine.prefill_factor
        self._heads, self._rows, self._start = heads.query, constants.tile, constants.tile_start
        self._overlap, self._root = constants.overlap, 1 / constants.overlap if constants.overlap else 0.0
        self.reads_decode_lengths = self._unified and not self._overlap
        self.decode_kernel_ps = round(layers * constants.decode_us * 1e6 * decode)
        self._prefill_kernel_ps = round(layers * constants.prefill_us * 1e6 * prefill)
        full_layers, self._window, self._window_share = layers - window_layers, window, window_layers / layers
        layer_token_bytes = heads.kv * heads.size * 2 * heads.kv_bytes
        self._kv_token_bytes = full_layers * layer_token_bytes
        self._window_bytes = window_layers * layer_token_bytes * window
        bandwidth = gpu.gb_per_second * 1e9 * constants.decode_bandwidth
        self.kv_token_ps = round(self._kv_token_bytes / bandwidth * PS_PER_SECOND * decode)
        window_ps = self._window_bytes / bandwidth * PS_PER_SECOND * decode
        self.sequence_ps = round(layers * heads.kv * constants.sequence_ns * 1e3 * decode + window_ps)
        self.longest_token_ps = round(full_layers * constants.longest_ns * 1e3 * decode)
        tile_flops = 4 * self._rows * heads.size * gpu.num_sms
        seconds = layers * tile_flops / (gpu.tflops * 1e12 * constants.prefill_flops) * prefill
        self._tile_token_ps = seconds * PS_PER_SECOND
        self._half_tile_token_ps = round(seconds / 2 * PS_PER_SECOND)
        self._store_token_ps = 0
        if constants.store_bandwidth:
            per_second = gpu.gb_per_second * 1e9 * constants.store_bandwidth
            self._store_token_ps = round(layers * 4 * heads.kv * heads.size / per_second * PS_PER_SECOND * prefill)
        self._pair_flops = 4 * full_layers * heads.query * heads.size
        self._window_flops = 4 * window_layers * heads.query * heads.size * window

    def batch_ps(self, batch: Batch) -> int:
        """Return the duration of the step's attention."""
        num_decodes, longest = batch.num_decodes, batch.max_decode_kv_tokens
        return self.step_ps(batch.prefills, num_decodes, batch.decode_kv_tokens, longest, batch.decode_lengths)

    def step_ps(
        self,
        chunks: Sequence[PrefillChunk],
        num_decodes: int,
        kv_tokens: int,
        longest: int,
        lengths: tuple[int, ...] = (),
    ) -> int:
        """Return the duration of attention, given a batch's fields."""
        if not chunks:
            return self.decode_ps(num_decodes, kv_tokens, longest) if num_decodes else 0
        if self._overlap:
            return self._beside(self._tiles_ps(chunks), num_decodes, kv_tokens, longest)
        if not self._unified or not num_decodes:
            decode_ps = self.decode_ps(num_decodes, kv_tokens, longest) if num_decodes else 0
            return self._wave_ps(chunks, ()) + decode_ps + self._prefill_kernel_ps
        tiles_ps = self._wave_ps(chunks, lengths or (longest,) * num_decodes)
        kernel_ps = max(self._prefill_kernel_ps, self.decode_kernel_ps)
        return max(tiles_ps, kv_tokens * self.kv_token_ps) + kernel_ps

    def piece_ps(self, new_tokens: int, past_tokens: int, num_decodes: int, kv_tokens: int, longest: int) -> int:
        """Return `step_ps` of a single chunk; a long prompt has many of them."""
        if not self._overlap:
            return self.step_ps((PrefillChunk(new_tokens, past_tokens, False),), num_decodes, kv_tokens, longest)
        total = -(-new_tokens // self._rows) * (self._seen(past_tokens + new_tokens / 2) + self._start)
        tiles_ps = self._shared_out_ps(total, self._seen(past_tokens + new_tokens), new_tokens)
        return self._beside(tiles_ps, num_decodes, kv_tokens, longest)

    def _beside(self, tiles_ps: int, num_decodes: int, kv_tokens: int, longest: int) -> int:
        """Return the time of tiles that SMs share, and of the decodes of the same step."""
        if not num_decodes:
            return tiles_ps + self._prefill_kernel_ps
        decode_ps = self.decode_ps(num_decodes, kv_tokens, longest)
        if not self._unified:
            return tiles_ps + decode_ps + self._prefill_kernel_ps
        kernel_ps = max(self._prefill_kernel_ps, self.decode_kernel_ps)
        return max(tiles_ps, decode_ps - self.decode_kernel_ps) + kernel_ps

    def prefill_ps(self, chunks: Sequence[PrefillChunk]) -> int:
        """Return the attention time of prompt chunks alone."""
        return (self._tiles_ps(chunks) if self._overlap else self._wave_ps(chunks, ())) + self._prefill_kernel_ps

    def decode_ps(self, num_decodes: int, kv_tokens: int, longest: int) -> int:
        """Return the attention time of decodes alone; `longest` is the largest number of KV tokens of one of them."""
        tokens_ps = kv_tokens * self.kv_token_ps + longest * self.longest_token_ps
        return tokens_ps + num_decodes * self.sequence_ps + self.decode_kernel_ps

    def _tiles_ps(self, chunks: Sequence[PrefillChunk]) -> int:
        """Return the time of tiles that go to SMs as these become free, and of the stores to the cache."""
        rows, start, longest, new_tokens = self._rows, self._start, 0, 0
        total = 0.0
        for chunk in chunks:
            new, past = chunk.new_tokens, chunk.past_tokens
            total += -(-new // rows) * (self._seen(past + new / 2) + start)
            longest = max(longest, past + new)
            new_tokens += new
        return self._shared_out_ps(total, self._seen(longest), new_tokens) if new_tokens else 0

    def _seen(self, tokens: float) -> float:
        """Return the mean over layers of the tokens that a tile reads, of those before it."""
        if not self._window or tokens <= self._window:
            return tokens
        return tokens - self._window_share * (tokens - self._window)

    def _shared_out_ps(self, total: float, longest: float, new_tokens: int) -> int:
        """Return the time for the sum of one head's tiles, the longest of which has this many KV tokens."""
        # In compiled code `math.pow` and `math.floor` are calls of C's; `**` and `round` would make objects.
        all_tiles = math.pow(total * (self._heads / self._num_sms), self._overlap)
        tokens = math.pow(all_tiles + math.pow(longest + self._start, self._overlap), self._root)
        return math.floor(self._tile_token_ps * tokens + 0.5) + new_tokens * self._store_token_ps

    def _wave_ps(self, chunks: Sequence[PrefillChunk], decodes: Sequence[int]) -> int:
        """Return the time of tiles that run in whole waves."""
        tiles = [_chunk_tiles(chunk, self._heads) for chunk in chunks]
        tiles += [(2 * (length + TILE_START_TOKENS), self._heads) for length in decodes]
        return waves(tiles, self._num_sms) * self._half_tile_token_ps

    def work(self, batch: Batch) -> tuple[float, float]:
        """Return the step's (FLOP, bytes of KV cache read and written)."""
        pairs = float(batch.decode_kv_tokens + batch.num_decodes)
        tokens = batch.decode_kv_tokens + batch.num_decodes
        num_sequences, new_tokens = batch.num_decodes + len(batch.prefills), batch.num_decodes
        for chunk in batch.prefills:
            pairs += chunk.new_tokens * (chunk.past_tokens + (chunk.new_tokens + 1) / 2)
            tokens += chunk.past_tokens + chunk.new_tokens
            new_tokens += chunk.new_tokens
        flops = pairs * self._pair_flops + float(new_tokens * self._window_flops)
        return flops, float(tokens * self._kv_token_bytes + num_sequences * self._window_bytes)


def prefill_waves(chunks: Iterable[PrefillChunk], num_heads: int, num_sms: int) -> int:
    """Return how long prefill attention occupies the GPU, in half tokens of tile length.

    Monotone in every argument but `num_sms`: a further chunk, a longer chunk or more context never shortens it.

    Args:
        chunks: the step's prompt chunks.
        num_heads: query heads on this GPU.
        num_sms: tiles that run at once.
    """
    return waves([_chunk_tiles(chunk, num_heads) for chunk in chunks], num_sms)


def waves(tiles: list[tuple[int, int]], num_sms: int) -> int:
    """Return the sum of the longest tile of each wave of `num_sms` tiles, longest tiles first.

    Args:
        tiles: (length, how many); sorted in place.
        num_sms: tiles that run at once.
    """
    tiles.sort(reverse=True)
    total = first = 0
    for length, count in tiles:
        # Waves begin at tiles 0, S, 2S, ...: how many of those lie in [first, first + count)?
        total += length * (-(-(first + count) // num_sms) - -(-first // num_sms))
        first += count
    return total


def _chunk_tiles(chunk: PrefillChunk, num_heads: int) -> tuple[int, int]:
    half_length = 2 * (chunk.past_tokens + TILE_START_TOKENS + TILE // 2) + chunk.new_tokens
    return half_length, -(-chunk.new_tokens // TILE) * num_heads
