"""Static ("naive", synchronous) batching: a batch is formed, runs until its longest sequence has ended, then the next.

Nothing enters a running batch, and nothing leaves it: a sequence that has ended keeps its place, its KV tokens and its
share of every step, as padding does, and its stream ends with the batch. Tokens are streamed as they are produced.
"""

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait, whole


class Static:
    """One batch after another.

    Args:
        limits: of a batch.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        if len(context.running):
            return Step(decode=True, max_steps=context.running.steps_to_last_length(), hold=True)
        admitted = context.admit(self.limits, at_ps)
        return Step(whole(admitted), hold=True) if admitted else Wait()

    def advanced(self, num_decode_steps: int) -> None:
        """Nothing depends on the number of steps done."""

    def emptied(self, at_ps: int) -> None:
        """Nothing depends on how long the batch has been empty."""

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether the batch is empty: no arrival matters while one runs."""
        return not len(context.running)
