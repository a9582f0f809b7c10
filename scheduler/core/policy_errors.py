"""Exceptions raised by the queue and the way to batch of a replica."""

from lorrery.scheduler.core.sequence import Sequence


class SequenceError(Exception):
    """A policy raised while handling one sequence.

    Args:
        sequence: that sequence; it is in no queue.
        error: the exception.
    """

    def __init__(self, sequence: Sequence, error: Exception) -> None:
        super().__init__(sequence.handle)
        self.sequence = sequence
        self.error = error


class PolicyErrors:
    """Keeps what a policy raised outside a decision until the next one, which can end the sequences concerned.

    Attributes:
        error: the last exception; None: none.
        queue_is_broken: whether the queue cannot even be emptied; then its error stays.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.queue_is_broken = False

    def raise_again(self) -> None:
        """Raise the kept exception, if any."""
        error = self.error
        if error is not None:
            if not self.queue_is_broken:
                self.error = None
            raise error
