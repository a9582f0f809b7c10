"""Time of the attention kernels of a step, over all layers, in whole picoseconds.

A GPU with S SMs runs S tiles at a time; a tile is 64 query rows of one head. Sequence i computes c_i tokens after p_i
cached ones, with q query heads and kv KV heads of d elements on this GPU, an element of the cache taking a bytes:

    attn_decode  = sum_i p_i * kv * d * 2a / (B e) + t_attn
    attn_prefill = tau * waves + t_attn              tau = 4 * 64 d S / (F e): the time per KV token of one tile
    waves        = tiles, longest first, S at a time; each wave lasts as long as its longest tile. Sequence i has
                   ceil(c_i/64) q tiles of length p_i + c_i/2 + 132
    split        = attn_prefill(prefills) + attn_decode(decodes)                two kernels, each if it has work
    unified      = max(tau * waves, decodes' KV bytes / (B e)) + t_attn         one kernel: a decode has q tiles (of one
                   row each) of length p_i + 100. A step of decodes alone runs attn_decode.

Integer arithmetic: the time per decode KV token and the time per half token of tile length are rounded once.
"""

from collections.abc import Iterable

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.architecture import Model, Precision, Shard
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.hardware import Gpu, KernelFit
from lorrery.worker.device.kernels import TILE

TILE_START_TOKENS = 100
"""What an attention tile costs before its first KV token; 60 to 140 fit alike."""


class AttentionKernels:
    """The formulas above for one GPU.

    Args:
        gpu: the data sheet.
        fit: how close its kernels come to it.
        model: what it serves.
        shard: its share of the model.
        precision: of the KV cache.
        unified: whether a step with prefills and decodes runs one kernel.
    """

    def __init__(
        self, gpu: Gpu, fit: KernelFit, model: Model, shard: Shard, precision: Precision, *, unified: bool
    ) -> None:
        layers, self._num_sms, self._unified = model.num_layers, gpu.num_sms, unified
        self._heads = shard.queries // model.head_size
        self.kernel_ps = round(layers * fit.attention_us * 1e6)
        self.kv_token_bytes = layers * shard.kv * 2 * precision.kv_bytes
        bandwidth = gpu.gb_per_second * 1e9 * fit.decode_bandwidth
        self.kv_token_ps = round(self.kv_token_bytes / bandwidth * PS_PER_SECOND)
        tile_flops = 4 * TILE * model.head_size * gpu.num_sms
        seconds = layers * tile_flops / (gpu.tflops * 1e12 * fit.prefill_flops)
        self._half_tile_token_ps = round(seconds / 2 * PS_PER_SECOND)
        self._pair_flops = 4 * layers * shard.queries

    def batch_ps(self, batch: Batch) -> int:
        """Return how long the step's attention takes."""
        if not batch.prefills:
            return batch.decode_kv_tokens * self.kv_token_ps + self.kernel_ps if batch.num_decodes else 0
        tiles = [_chunk_tiles(chunk, self._heads) for chunk in batch.prefills]
        if batch.num_decodes and self._unified:
            lengths = batch.decode_lengths or (batch.max_decode_kv_tokens,) * batch.num_decodes
            tiles += [(2 * (length + TILE_START_TOKENS), self._heads) for length in lengths]
            tiles_ps = waves(tiles, self._num_sms) * self._half_tile_token_ps
            return max(tiles_ps, batch.decode_kv_tokens * self.kv_token_ps) + self.kernel_ps
        prefill_ps = waves(tiles, self._num_sms) * self._half_tile_token_ps + self.kernel_ps
        if not batch.num_decodes:
            return prefill_ps
        return prefill_ps + batch.decode_kv_tokens * self.kv_token_ps + self.kernel_ps

    def work(self, batch: Batch) -> tuple[float, float]:
        """Return the step's (FLOP, bytes of KV cache read and written)."""
        pairs = float(batch.decode_kv_tokens + batch.num_decodes)
        tokens = batch.decode_kv_tokens + batch.num_decodes
        for chunk in batch.prefills:
            pairs += chunk.new_tokens * (chunk.past_tokens + (chunk.new_tokens + 1) / 2)
            tokens += chunk.past_tokens + chunk.new_tokens
        return pairs * self._pair_flops, float(tokens * self.kv_token_bytes)


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
