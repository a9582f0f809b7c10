"""What the core and the wrappers of plug-ins share: a policy's errors, and the end of one that only ever waits.

A policy that names the next picosecond and admits no sequence would keep a simulation, or a scheduler, busy for ever.
Its waits are counted as answered, not as they pass: live and simulated, the same decision is the one too many.
"""

from typing import Final

from lorrery.scheduler.core.admission import CHECK_IT
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.units import PS_PER_SECOND


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


WAITS_ON: Final = 10_000
FEWEST_WAITS_ON: Final = 100
MEAN_WAIT_PS: Final = PS_PER_SECOND // WAITS_ON
"""A policy may name the time of the next decision `WAITS_ON` times in a row if the waits are shorter than this on
average, which is about what one decision takes live. Whenever that has ended all requests of its worker, a tenth as
often from then on, down to `FEWEST_WAITS_ON` times."""


class Checked:
    """A wrapper of a policy from outside the tree.

    Attributes:
        original: the policy.
    """

    def __init__(self, original: object) -> None:
        self.original = original


def original(policy: object) -> object:
    """Return the policy that a wrapper stands for, whose class says what it is; any other policy itself."""
    return policy.original if isinstance(policy, Checked) else policy


class Waits:
    """Consecutive times that a policy has named for the next decision.

    From the one too many on, each further one is too, until the row ends.

    Args:
        answers: what the policy answers, for the message.
        cure: what it should do instead.
    """

    def __init__(self, answers: str, cure: str) -> None:
        self._answers = answers
        self._cure = cure
        self._allowed = WAITS_ON
        self._num = 0
        self._total_ps = 0

    @property
    def are_too_many(self) -> bool:
        """Whether the last one was one too many."""
        return self._num >= self._allowed

    def end(self) -> None:
        """End the row: something ran, a sequence has left the queue, or the policy named no time."""
        self._num = self._total_ps = 0

    def all_ended(self) -> None:
        """End the row as no sequence is left; allow fewer if that is because it was too long."""
        if self.are_too_many:
            self._allowed = max(FEWEST_WAITS_ON, self._allowed // 10)
        self.end()

    def add(self, wait_ps: int) -> None:
        """Count a time that is `wait_ps` from now.

        Raises:
            ValueError: it is one too many.
        """
        self._num += 1
        self._total_ps += min(wait_ps, PS_PER_SECOND)
        if not self.are_too_many:
            return
        mean_ps = self._total_ps // self._num
        if mean_ps >= MEAN_WAIT_PS:
            self.end()
            return
        at_most_ps = 1  # a power of ten above the mean, so that there are few such messages
        while at_most_ps < mean_ps:
            at_most_ps *= 10
        raise ValueError(
            f"{self._answers} {self._allowed:,} times in a row, on average at most {at_most_ps:,} ps later, and nothing"
            f" ran and no request was admitted or dropped; {self._cure}; {CHECK_IT}"
        )


def a(answer: object) -> str:
    """Name a result by its type: messages that have its value would differ each time."""
    return "None" if answer is None else f"a {type(answer).__name__}"
