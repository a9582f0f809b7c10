"""A bound on how many sequences may overtake the one that has waited longest.

Queues that prefer some sequences to others (by adapter, by length) would let the others starve while enough preferred
ones arrive. S-LoRA's have no such bound, except its one-adapter queue, which stops at 30 others; that number is used
here too.
"""

from lorrery.scheduler.core.sequence import Sequence

MAX_OVERTAKES = 30


class Patience:
    """Counts the sequences that overtake the one that has waited longest (the head).

    Args:
        most: largest number allowed.
    """

    def __init__(self, most: int = MAX_OVERTAKES) -> None:
        self._most = most
        self._head: Sequence | None = None
        self._overtakes = 0

    def left(self, head: Sequence) -> int:
        """Return how many may still enter before the head must."""
        return self._most - self._overtakes if head is self._head else self._most

    def note(self, head: Sequence, admitted: list[Sequence]) -> None:
        """Count the admitted sequences while this was the head; none: nothing changes."""
        if not admitted:
            return
        overtakes = self._most - self.left(head) + len(admitted)
        self._head, self._overtakes = (None, 0) if head in admitted else (head, overtakes)
