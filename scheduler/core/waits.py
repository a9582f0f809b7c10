"""The end of a policy from outside the tree that only ever waits.

A policy that names the next picosecond and admits no sequence would keep a simulation, or a scheduler, busy for ever.
Its waits are counted as answered, not as they pass: live and simulated, the same decision is the one too many.
"""

from typing import Final

from lorrery.scheduler.core.admission import CHECK_IT
from lorrery.vocabulary.units import PS_PER_SECOND

WAITS_ON: Final = 10_000
FEWEST_WAITS_ON: Final = 100
MEAN_WAIT_PS: Final = PS_PER_SECOND // WAITS_ON
"""A policy may name the time of the next decision `WAITS_ON` times in a row if the waits are shorter than this on
average, which is about what one decision takes live. Whenever that has ended all requests of its worker, a tenth as
often from then on, down to `FEWEST_WAITS_ON` times."""


class Waits:
    """Consecutive decisions to run nothing until a time that the policy named.

    From the one too many on, each further one is too, until something runs, a sequence leaves the queue, or all have
    been ended.
    """

    __slots__ = ("_allowed", "_num", "_total_ps")

    def __init__(self) -> None:
        self._allowed = WAITS_ON
        self._num = 0
        self._total_ps = 0

    def end(self) -> None:
        """Forget the decisions so far: something runs, or a sequence has left the queue."""
        self._num = self._total_ps = 0

    def all_ended(self) -> None:
        """Forget the decisions so far, since an error has ended all sequences; allow fewer if this was the error."""
        if self._num >= self._allowed:
            self._allowed = max(FEWEST_WAITS_ON, self._allowed // 10)
        self.end()

    def add(self, wait_ps: int, *, is_of_queue: bool) -> None:
        """Count a decision.

        Args:
            wait_ps: until the time that was named.
            is_of_queue: whether the queue named it; otherwise the way to batch.

        Raises:
            ValueError: it is one too many.
        """
        self._num += 1
        self._total_ps += min(wait_ps, PS_PER_SECOND)
        if self._num < self._allowed:
            return
        mean_ps = self._total_ps // self._num
        if mean_ps >= MEAN_WAIT_PS:
            self.end()
            return
        raise ValueError(_waits_on(self._allowed, mean_ps, is_of_queue=is_of_queue))


def _waits_on(num: int, mean_ps: int, *, is_of_queue: bool) -> str:
    """Name the mean as a power of ten above it, so that there are few such messages."""
    at_most_ps = 1
    while at_most_ps < mean_ps:
        at_most_ps *= 10
    answers = "`wakes_at_ps` answered a time" if is_of_queue else "`choose` answered a Wait"
    cure = (
        "answer the time from which `admit` decides otherwise, or None: it is called when something arrives"
        if is_of_queue
        else "wait until the time from which it chooses a Step, or until None: it is called when something arrives"
    )
    return (
        f"{answers} {num:,} times in a row, on average at most {at_most_ps:,} ps later, and nothing ran and no"
        f" request was admitted or dropped; {cure}; {CHECK_IT}"
    )
