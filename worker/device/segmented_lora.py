"""Time of SGLang's segmented LoRA kernels: a pair of launches for all adapters of a step and all slices of a layer.

Its default backend, `csgmv`, sorts a step's tokens by adapter and cuts each adapter's into segments of 16. A Triton
kernel, `shrink`, multiplies them by A; another, `expand`, adds the product with B. Projections side by side (query, key
and value; gate and up) are one pair of launches. A segment has the same programs however few tokens it has. In a CUDA
graph the grids have room for the segments of the largest batch of any graph, whichever runs, and programs without a
segment end at once:

    columns = ceil(slices rank / 16)       shrink programs of a segment; rank: the largest for which the pool has room
    tiles   = ceil(outer / 64)             expand programs of a segment
    steps   = ceil(inner / 256)            of a shrink program, one after another
    blocks  = ceil(own rank / 16)          of an expand program, likewise
    idle    = (slots - segments) (columns + tiles)

    t = us + step_us steps + shrink_ns segments columns steps + expand_ns segments tiles blocks
        + token_ns tokens tiles + idle_ns idle

`token_ns` is the output, which is read and written. Tiles and segments are those of sgl-project/sglang 0.5.23
(`srt/lora/backend/chunked_backend.py`, `kernels/ops/lora/dense`) without tuned tiles, which it ships for a few shapes.
The form was found on, and the constants fitted to, timings on H100 and H200 (docs/validation.md); both have similar
ones.
"""

from math import ceil

from lorrery.worker.device.grouped_lora import Slices
from lorrery.worker.device.hardware import SegmentedLoraFit

SEGMENT_TOKENS = 16
"""Most tokens of a segment: SGLang's `max_lora_chunk_size`, unless a user raises it."""
_RANKS, _COLUMNS, _INNER = 16, 64, 256


def num_segments(tokens: int, adapters: int) -> int:
    """Return the most segments that so many tokens of so many adapters make; exact for one adapter."""
    return adapters + max(tokens - adapters, 0) // SEGMENT_TOKENS


def graph_slots(tokens: int, max_loras: int) -> int:
    """Return the segments for which the grids of a prefill's CUDA graphs have room.

    Args:
        tokens: the most of a step.
        max_loras: places for adapters.
    """
    return ceil(tokens / SEGMENT_TOKENS) + max_loras


def segmented_seconds(
    fit: SegmentedLoraFit, slices: Slices, tokens: int, segments: int, slots: int, rank: int, own_rank: int
) -> float:
    """Return the seconds of a pair of launches.

    Args:
        fit: the constants.
        slices: of the layer.
        tokens: of the step, with an adapter.
        segments: into which they are cut.
        slots: segments for which the grids have room; if fewer than `segments`, they have none to spare.
        rank: the largest that the pool has room for, `max_lora_rank`.
        own_rank: of the step's adapters, at most `rank`.
    """
    columns, tiles = ceil(slices.number * rank / _RANKS), ceil(slices.outer / _COLUMNS)
    steps = ceil(slices.inner / _INNER)
    ns = segments * columns * steps * fit.shrink_ns + segments * tiles * ceil(own_rank / _RANKS) * fit.expand_ns
    ns += tokens * tiles * fit.token_ns + max(slots - segments, 0) * (columns + tiles) * fit.idle_ns
    return (fit.us + steps * fit.step_us) * 1e-6 + ns * 1e-9
