"""Time of vLLM's grouped LoRA kernels: one pair of launches for all adapters of a step and all slices of a layer.

vLLM computes the adapters of one linear layer by two Triton kernels, `shrink` (x A) and `expand` (adds the product with
B). A layer that is several projections side by side (query, key and value; gate and up) is one pair of launches with as
many slices. Their grids do not depend on a step's adapters: they have a plane for each of `max_loras` places and one
for tokens without an adapter, each with the programs that *all* tokens would need, and a program without work ends at
once. So `max_loras`, not only a step's work, costs time; and since a program's work is tiny, the formula counts
programs, not bytes or FLOP:

    parts, width = 64, 256 below 128 tokens, else 8, 32          shrink cuts `inner` into parts, walked by width
    steps        = ceil(inner / (parts width)) width / 32        of a shrink program, one after another
    shrink       = slices parts ceil(rank / 16)                  programs for 32 tokens of one adapter
    expand       = slices ceil(widest / columns)                 for 64 tokens; columns 64, or 128 of one slice
    at work      = for each adapter, tiles of its tokens; idle = all others of the grid

    t = us + step_us steps + (shrink at work) steps shrink_ns + (expand at work, within its slice) expand_ns
        + idle idle_ns + (at work, if there are several slices) slice_ns

With several slices each program looks up where its slice lies, which costs as much as a small program. The form was
found on, and the constants fitted to, timings on H100 and H200 (docs/validation.md); both have similar ones, since
neither bandwidth nor arithmetic bounds these kernels.
"""

from math import ceil
from typing import NamedTuple

from lorrery.worker.device.hardware import LoraFit

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
    """Return the seconds of a pair of launches.

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
