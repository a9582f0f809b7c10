"""Continuous batching with separate prefill: iteration-level scheduling (Orca, OSDI 2022) as in vLLM's first scheduler.

At every boundary the sequences that fit enter, in a prefill of their own that the running ones wait for; otherwise
every running sequence decodes. A sequence leaves in the step that ends it.
"""

from typing import ClassVar

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait, whole


class Continuous:
    """Admit at every boundary, prefill first.

    Args:
        limits: of one prefill and of the batch.
    """

    decodes_on: ClassVar[bool] = True

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        admitted = context.admit(self.limits, at_ps)
        if admitted:
            return Step(whole(admitted))
        if not len(context.running):
            return Wait()
        return Step(decode=True, max_steps=context.steps_blocked(context.running.steps_to_length()))

    def advanced(self, num_decode_steps: int) -> None:
        """Nothing depends on the number of steps done."""

    def emptied(self, at_ps: int) -> None:
        """Nothing depends on how long the batch has been empty."""

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may matter before the last choice has run out."""
        return context.arrivals_matter()
