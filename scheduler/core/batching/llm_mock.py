"""llm-mock's way to batch (github.com/dongmingli-Ben/llm-mock, commit f07dd39): mixed steps, places by number.

The first so many requests in order of arrival are the batch; each keeps its place until it has ended, and newcomers
enter at the start of the next step, with their whole prompt, beside those that decode. Nothing but the number of places
limits it. An engine whose batch has drained, with nobody waiting, runs one more step that holds nothing, and only then
sleeps; who arrives during that step waits for its end.
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
        """Take note that an empty step is due."""
        self._drained = True

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Tell whether an arrival may matter before the last choice is through."""
        return context.arrivals_matter()
