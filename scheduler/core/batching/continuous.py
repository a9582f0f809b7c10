"""Continuous batching with separate prefill: iteration-level scheduling (Orca, OSDI 2022) as in vLLM's first scheduler.

At every boundary whoever may enter enters, in a prefill of their own that the running sequences wait for; otherwise
every running sequence decodes. A sequence leaves in the step that ends it.
"""

from scheduler.core.batching.base import Choice, Decode, Prefill, Wait
from scheduler.core.queues.base import Queue
from scheduler.core.running import Running


class Continuous:
    """Admit at every boundary, prefill first.

    Args:
        queue: who waits.
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def choose(self, running: Running, at_ps: int) -> Choice:
        """Decide at a boundary."""
        admitted = self.queue.admit(running, at_ps)
        if admitted:
            return Prefill(admitted)
        if not len(running):
            return Wait()
        return Decode(self.queue.steps_blocked(running, running.steps_to_length()))

    def advanced(self, num_decode_steps: int) -> None:
        """Nothing depends on the number of steps done."""

    def emptied(self, at_ps: int) -> None:
        """Nothing depends on how long the batch has been empty."""

    def heeds_arrivals(self, running: Running) -> bool:
        """Tell whether an arrival may matter before the last choice is through."""
        return self.queue.heeds_arrivals()
