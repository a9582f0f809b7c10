"""Continuous batching with mixed steps: a step prefills new sequences and decodes the rest (Orca, OSDI 2022; llm-mock).

No step is spent on prefill alone, but every running sequence waits for the whole of a new one's prompt. The tokens of a
step, one per decoding sequence and the new prompts, stay within the prompt limit.
"""

from typing import ClassVar

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait, whole


class Mixed:
    """Admit at every boundary, prefill and decode in one step.

    Args:
        limits: `max_prompt_tokens` bounds the tokens of a whole step.
    """

    decodes_on: ClassVar[bool] = True

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        num_decoding = context.running.num_decoding
        admitted = context.admit(self.limits, at_ps, self.limits.max_prompt_tokens - num_decoding)
        if admitted:
            return Step(whole(admitted), decode=num_decoding > 0)
        if not num_decoding:
            return Wait()
        return Step(decode=True, max_steps=context.steps_blocked(context.running.steps_to_length()))

    def advanced(self, num_decode_steps: int) -> None:
        """Nothing depends on the number of steps done."""

    def emptied(self, at_ps: int) -> None:
        """Nothing depends on how long the batch has been empty."""

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may matter before the last choice has run out."""
        return context.arrivals_matter()
