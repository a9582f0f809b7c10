"""Prefill first, in chunks: SGLang's way to batch (sgl-project/sglang, srt/managers/scheduler.py).

While prompts are in prefill or may enter, a step computes prompts alone, as many as its token budget holds
(`chunked_prefill_size`); the last one is cut where the budget ends and continues first in the next step. Decode steps
run only when no sequence may enter. So a wave of prompts stalls all decoding sequences until all of it is computed.

`continuous` is the same with whole prompts, `chunked` lets decodes run beside the chunks.
"""

from dataclasses import replace
from typing import ClassVar

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait
from lorrery.scheduler.core.batching.chunked import chunks_within, steps_alike


class PrefillFirst:
    """Compute prompts before anything decodes, in steps of a token budget.

    Args:
        limits: `max_prompt_tokens` is the token budget of a step with prompts.
    """

    decodes_on: ClassVar[bool] = True

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = replace(limits, partial=True)

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        running = context.running
        chunks = chunks_within(context, self.limits, at_ps, self.limits.max_prompt_tokens)
        if chunks:
            return Step(chunks, chunk_steps=steps_alike(chunks))
        if not running.num_decoding:
            return Wait()
        return Step(decode=True, max_steps=context.steps_blocked(running.steps_to_length()))

    def advanced(self, num_decode_steps: int) -> None:
        """Nothing depends on the number of steps done."""

    def emptied(self, at_ps: int) -> None:
        """Nothing depends on how long the batch has been empty."""

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may matter before the last choice has run out."""
        return context.arrivals_matter()
