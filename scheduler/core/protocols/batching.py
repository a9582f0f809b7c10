"""Who chooses the next step."""

from typing import Protocol

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait


class Batching(Protocol):
    """Chooses the next step. Its own state changes in `choose`, `advanced` and `emptied` only."""

    @property
    def limits(self) -> BatchLimits:
        """What one admission pass may take into a batch that is empty."""
        ...

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Decide at a boundary. `Step.max_steps` says how long the same answer would hold without events."""
        ...

    def advanced(self, num_decode_steps: int) -> None:
        """Take note that so many decode steps of the last choice are done."""
        ...

    def emptied(self, at_ps: int) -> None:
        """Take note that the batch became empty at this boundary."""
        ...

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Tell whether an arrival may change the last choice before it is through."""
        ...
