"""Time of the LoRA kernels of a layer: vLLM's grouped ones, and SGLang's segmented ones.

Both are a pair of Triton kernels for all adapters of a step and all slices of a layer: `shrink` (x A) and `expand`
(adds the product with B). A layer that is several projections side by side (query, key and value; gate and up) is one
pair of launches with as many slices. The forms were found on, and the constants fitted to, timings on H100 and H200
(docs/validation.md); both GPUs have similar ones, since neither bandwidth nor arithmetic bounds these kernels.
"""

from math import ceil
from typing import NamedTuple

from lorrery.worker.device.catalogue.hardware import LoraFit, SegmentedLoraFit

_FEW_TOKENS = 128
_SHRINK_ROWS, _EXPAND_ROWS, _SHRINK_COLUMNS = 32, 64, 16


class Slices(NamedTuple):
    """Projections side by side on one GPU, adapted by one pair of launches.

    Attributes:
        inner: input elements.
        outer: output elements of all.
        widest: output elements of the widest.
        number: of projections.
    """

    inner: int
    outer: int
    widest: int
    number: int = 1


def grouped_seconds(fit: LoraFit, slices: Slices, tokens: int, adapters: int, places: int, rank: int) -> float:
    """Return the seconds of a pair of launches of vLLM's grouped kernels.

    Their grids do not depend on a step's adapters: they have a plane for each of `max_loras` places and one for tokens
    without an adapter, each with the programs that *all* tokens would need, and a program without work ends at once. So
    `max_loras`, not only a step's work, costs time; and since a program's work is tiny, the formula counts programs,
    not bytes or FLOP:

        parts, width = 64, 256 below 128 tokens, else 8, 32          shrink cuts `inner` into parts, walked by width
        steps        = ceil(inner / (parts width)) width / 32        of a shrink program, one after another
        shrink       = slices parts ceil(rank / 16)                  programs for 32 tokens of one adapter
        expand       = slices ceil(widest / columns)                 for 64 tokens; columns 64, or 128 of one slice
        at work      = for each adapter, tiles of its tokens; idle = all others of the grid

        t = us + step_us steps + (shrink at work) steps shrink_ns + (expand at work, within its slice) expand_ns
            + idle idle_ns + (at work, if there are several slices) slice_ns

    With several slices each program looks up where its slice lies, which costs as much as a small program.

    Args:
        fit: the constants.
        slices: of the layer.
        tokens: of the step, at least one of each adapter.
        adapters: distinct ones among them.
        places: for adapters on the GPU, `max_loras`.
        rank: at which the kernels run, `max_lora_rank`.
    """
    few, number = tokens < _FEW_TOKENS, slices.number
    parts, width = (64, 256) if few else (8, 32)
    steps = ceil(slices.inner / (parts * width)) * width // 32
    columns = 128 if number == 1 else 64
    # Slices other than the widest get the mean width of the rest, which is exact for all existing layers.
    within = ceil(slices.widest / columns)
    if number > 1:
        within += (number - 1) * ceil((slices.outer - slices.widest) / (number - 1) / columns)
    shrink = number * parts * ceil(rank / _SHRINK_COLUMNS)
    expand = number * ceil(slices.widest / columns)
    further = max(tokens - adapters, 0)
    shrinking = shrink * (adapters + further // _SHRINK_ROWS)
    expanding_tiles = adapters + further // _EXPAND_ROWS
    planes = max(places, adapters) + 1
    grid = planes * (shrink * ceil(tokens / _SHRINK_ROWS) + expand * ceil(tokens / _EXPAND_ROWS))
    idle = max(grid - shrinking - expand * expanding_tiles, 0)
    ns = shrinking * steps * fit.shrink_ns + within * expanding_tiles * fit.expand_ns + idle * fit.idle_ns
    if number > 1:
        ns += (shrinking + expand * expanding_tiles) * fit.slice_ns
    return (fit.us + steps * fit.step_us) * 1e-6 + ns * 1e-9


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
    """Return the seconds of a pair of launches of SGLang's segmented kernels.

    Its default backend, `csgmv`, sorts a step's tokens by adapter and cuts each adapter's into segments of 16. A
    segment has the same programs however few tokens it has. In a CUDA graph the grids have room for the segments of the
    largest batch of any graph, whichever runs, and programs without a segment end at once:

        columns = ceil(slices rank / 16)       shrink programs of a segment; of the largest rank with room in the pool
        tiles   = ceil(outer / 64)             expand programs of a segment
        steps   = ceil(inner / 256)            of a shrink program, one after another
        blocks  = ceil(own rank / 16)          of an expand program, likewise
        idle    = (slots - segments) (columns + tiles)

        t = us + step_us steps + shrink_ns segments columns steps + expand_ns segments tiles blocks
            + token_ns tokens tiles + idle_ns idle

    `token_ns` is the output, which is read and written. Tiles and segments are those of sgl-project/sglang 0.5.23
    (`srt/lora/backend/chunked_backend.py`, `kernels/ops/lora/dense`) without tuned tiles, which it ships for a few
    shapes.

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
