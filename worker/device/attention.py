"""Time of the attention kernels of a step, over all layers, in whole picoseconds.

A GPU with S SMs runs S tiles at a time; a tile is r query rows of one head. Sequence i computes c_i tokens after p_i
cached ones, with q query heads and kv KV heads of d elements on this GPU, an element of the cache taking a bytes:

    attn_decode  = sum_i p_i * kv * d * 2a / (B e) + t_sequence * sequences + t_attn
    attn_prefill = sqrt(C^2 + M^2) + t_attn
    tau          = 4 r d S / (F e): the time per KV token of one tile, when all SMs are busy
    total        = sum of the tiles' lengths / S      sequence i has ceil(c_i/r) q tiles of mean length p_i + c_i/2 + s
    longest      = p_i + c_i + s, of the sequence where that is most
    C            = tau * (total^x + longest^x)^(1/x)     tiles go to SMs as these get free, and the last one ends alone
    M            = the queries', outputs' and KV's bytes / (0.8 B)
    split        = attn_prefill(prefills) + attn_decode(decodes)                two kernels, each if it has work
    unified      = max(C, decodes' KV bytes / (B e)) + t_attn    one kernel: a decode has q tiles (of one row each) of
                   length p_i + s. A step of decodes alone runs attn_decode.

Older fits have no exponent x; for those tiles of 64 rows run in whole waves:

    attn_prefill = tau * waves + t_attn
    waves        = tiles, longest first, S at a time; each wave lasts as long as its longest tile. Sequence i has
                   ceil(c_i/64) q tiles of length p_i + c_i/2 + 132

Integer arithmetic: the time per decode KV token and per sequence, and a prefill's time are rounded once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.architecture import Model, Precision, Shard
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.hardware import Gpu, KernelFit
from lorrery.worker.device.kernels import TILE

TILE_START_TOKENS = 100
"""What a tile of a wave costs before its first KV token; 60 to 140 fit alike."""
PREFILL_BANDWIDTH = 0.8
"""Share of the bandwidth at which a prefill reads and writes."""


@dataclass(frozen=True, slots=True)
class Heads:
    """One GPU's heads and its KV cache.

    Attributes:
        query: query heads.
        kv: KV heads.
        size: elements of one.
        kv_bytes: of an element of the cache.
        kv_type: one of `hardware.KV_TYPES`.
    """

    query: int
    kv: int
    size: int
    kv_bytes: int
    kv_type: str

    @classmethod
    def of(cls, model: Model, shard: Shard, precision: Precision) -> "Heads":
        """Return a shard's heads."""
        size = model.head_size
        return cls(shard.queries // size, shard.kv // size, size, precision.kv_bytes, precision.kv_type)


class AttentionKernels:
    """The formulas above for one GPU.

    Args:
        gpu: the data sheet.
        fit: how close its kernels come to it.
        heads: its share of the model.
        num_layers: how many layers' kernels to sum.
        unified: whether a step with prefills and decodes runs one kernel.
    """

    def __init__(self, gpu: Gpu, fit: KernelFit, heads: Heads, num_layers: int = 1, *, unified: bool = False) -> None:
        constants = fit.attention_of(heads.kv_type)
        layers, self._num_sms, self._unified = num_layers, gpu.num_sms, unified
        self._heads, self._rows, self._start = heads.query, constants.tile, constants.tile_start
        self._overlap = constants.overlap
        self._kernel_ps = round(layers * constants.us * 1e6)
        self._sequence_ps = round(layers * constants.sequence_us * 1e6)
        self._kv_token_bytes = layers * heads.kv * heads.size * 2 * heads.kv_bytes
        bandwidth = gpu.gb_per_second * 1e9 * constants.decode_bandwidth
        self.kv_token_ps = round(self._kv_token_bytes / bandwidth * PS_PER_SECOND)
        tile_flops = 4 * self._rows * heads.size * gpu.num_sms
        seconds = layers * tile_flops / (gpu.tflops * 1e12 * constants.prefill_flops)
        self._tile_token_ps = seconds * PS_PER_SECOND
        self._half_tile_token_ps = round(seconds / 2 * PS_PER_SECOND)
        byte_ps = layers * PS_PER_SECOND / (gpu.gb_per_second * 1e9 * PREFILL_BANDWIDTH)
        self._new_token_ps = 4 * (heads.query + heads.kv) * heads.size * byte_ps
        self._past_token_ps = 2 * heads.kv_bytes * heads.kv * heads.size * byte_ps
        self._pair_flops = 4 * layers * heads.query * heads.size

    def batch_ps(self, batch: Batch) -> int:
        """Return how long the step's attention takes."""
        num_decodes = batch.num_decodes
        if not batch.prefills:
            return self.decode_ps(num_decodes, batch.decode_kv_tokens) if num_decodes else 0
        if not num_decodes:
            return self.prefill_ps(batch.prefills)
        if not self._unified:
            return self.prefill_ps(batch.prefills) + self.decode_ps(num_decodes, batch.decode_kv_tokens)
        lengths = batch.decode_lengths or (batch.max_decode_kv_tokens,) * num_decodes
        tiles_ps = self._tiles_ps(batch.prefills, lengths)
        return max(tiles_ps, batch.decode_kv_tokens * self.kv_token_ps) + self._kernel_ps

    def prefill_ps(self, chunks: Sequence[PrefillChunk]) -> int:
        """Return how long the attention of prompt chunks alone takes."""
        return self._tiles_ps(chunks, ()) + self._kernel_ps

    def decode_ps(self, num_decodes: int, kv_tokens: int) -> int:
        """Return how long the attention of decodes alone takes."""
        return kv_tokens * self.kv_token_ps + num_decodes * self._sequence_ps + self._kernel_ps

    def _tiles_ps(self, chunks: Sequence[PrefillChunk], decodes: Sequence[int]) -> int:
        """Return how long the tiles of chunks and of decodes take; those of a decode have one row."""
        if not self._overlap:
            return self._wave_ps(chunks, decodes)
        rows, start, longest = self._rows, self._start, 0
        total = memory_ps = 0.0
        for chunk in chunks:
            new, past = chunk.new_tokens, chunk.past_tokens
            tiles = -(-new // rows)
            total += tiles * (past + new / 2 + start)
            longest = max(longest, past + new)
            memory_ps += new * self._new_token_ps + past * self._past_token_ps
        for length in decodes:
            total += length + start
            longest = max(longest, length)
        total *= self._heads / self._num_sms
        power = self._overlap
        compute_ps = self._tile_token_ps * (total**power + (longest + start) ** power) ** (1 / power)
        return round(sqrt(compute_ps * compute_ps + memory_ps * memory_ps))

    def _wave_ps(self, chunks: Sequence[PrefillChunk], decodes: Sequence[int]) -> int:
        """Return how long tiles take that run in whole waves."""
        tiles = [_chunk_tiles(chunk, self._heads) for chunk in chunks]
        tiles += [(2 * (length + TILE_START_TOKENS), self._heads) for length in decodes]
        return waves(tiles, self._num_sms) * self._half_tile_token_ps

    def work(self, batch: Batch) -> tuple[float, float]:
        """Return the step's (FLOP, bytes of KV cache read and written)."""
        pairs = float(batch.decode_kv_tokens + batch.num_decodes)
        tokens = batch.decode_kv_tokens + batch.num_decodes
        for chunk in batch.prefills:
            pairs += chunk.new_tokens * (chunk.past_tokens + (chunk.new_tokens + 1) / 2)
            tokens += chunk.past_tokens + chunk.new_tokens
        return pairs * self._pair_flops, float(tokens * self._kv_token_bytes)


def prefill_waves(chunks: Iterable[PrefillChunk], num_heads: int, num_sms: int) -> int:
    """Return how long prefill attention keeps the GPU, in half tokens of tile length.

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
