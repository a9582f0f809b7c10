"""The protocol of ways to batch."""

from typing import Protocol

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait


class Batching(Protocol):
    """Chooses the next step. Its own state changes in `choose`, `advanced` and `emptied` only."""

    @property
    def limits(self) -> BatchLimits:
        """Limits of one admission pass into an empty batch."""
        ...

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Choose the next step. `Step.max_steps` says for how long the choice would be the same without events."""
        ...

    def advanced(self, num_decode_steps: int) -> None:
        """Note that this many decode steps of the last choice are done."""
        ...

    def emptied(self, at_ps: int) -> None:
        """Note that the batch became empty at this boundary."""
        ...

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may change the last choice before it has run out."""
        ...
