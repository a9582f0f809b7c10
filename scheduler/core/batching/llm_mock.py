"""llm-mock's way to batch (github.com/dongmingli-Ben/llm-mock, commit f07dd39): mixed steps, limited by count only.

The first `max_sequences` requests in order of arrival are the batch; each keeps its place until it has ended, and new
ones enter at the start of the next step, with their whole prompt, beside the decoding ones. Only the number of places
limits the batch. An engine whose batch has drained with nothing waiting runs one more, empty step before it sleeps; a
request that arrives during that step waits for its end.
"""

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait
from lorrery.scheduler.core.batching.mixed import Mixed


class LlmMock:
    """Mixed batching, and an empty step each time the batch drains.

    Args:
        limits: `max_sequences` is llm-mock's BATCH_SIZE.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._mixed = Mixed(limits)
        self._drained = False

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary."""
        choice = self._mixed.choose(context, at_ps)
        drained, self._drained = self._drained, False
        return Step() if drained and isinstance(choice, Wait) else choice

    def advanced(self, num_decode_steps: int) -> None:
        """Nothing depends on the number of steps done."""

    def emptied(self, at_ps: int) -> None:
        """Note that an empty step is due."""
        self._drained = True

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may matter before the last choice has run out."""
        return context.arrivals_matter()
