"""What the queue and the way to batch of a replica have raised."""

from lorrery.scheduler.core.sequence import Sequence


class SequenceError(Exception):
    """A policy raised while it was given one sequence.

    Args:
        sequence: that one; it is in no queue.
        error: what was raised.
    """

    def __init__(self, sequence: Sequence, error: Exception) -> None:
        super().__init__(sequence.handle)
        self.sequence = sequence
        self.error = error


class PolicyErrors:
    """Keeps what a policy raised outside a decision until the next one, where it can end those whom it concerns.

    Attributes:
        error: the last that was raised; None: nothing.
        queue_is_broken: whether the queue cannot even be emptied; then its error stays.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.queue_is_broken = False

    def raise_again(self) -> None:
        """Raise what is kept, if anything."""
        error = self.error
        if error is not None:
            if not self.queue_is_broken:
                self.error = None
            raise error
