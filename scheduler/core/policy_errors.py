"""Exceptions raised by the queue and the way to batch of a replica."""

from lorrery.scheduler.core.sequence import Sequence


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception, as text that any log or message can carry.

    The message is its author's: to make it may raise, and half a surrogate pair in it cannot be encoded.
    """
    try:
        message = str(error)
    except Exception as other:
        message = f"(its message raised {type(other).__name__})"
    return f"{type(error).__name__}: {message}".encode("utf-8", "backslashreplace").decode("utf-8")


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
