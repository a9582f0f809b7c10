"""The next steps of a batch whose ends were computed one by one, as they have no closed form."""

from bisect import bisect_left


class KnownEnds:
    """See the module; the steps follow one another without a decision between them.

    Args:
        ends_ps: end of each step, from the start of the first; at least one.
    """

    __slots__ = ("_ends_ps", "_num_done")

    def __init__(self, ends_ps: list[int]) -> None:
        self._ends_ps = ends_ps
        self._num_done = 0

    @property
    def step_ps(self) -> int:
        """Duration of the next step."""
        return self.total_ps(1)

    def total_ps(self, num_steps: int) -> int:
        """Return the total duration of the next steps; they must have been computed."""
        return self._ends_ps[self._num_done + num_steps - 1] - self._done_ps

    def steps_to_cover(self, duration_ps: int, limit: int) -> int:
        """Return the fewest of the next steps, from 1 to `limit`, that take at least this long."""
        first = self._num_done
        return min(limit, bisect_left(self._ends_ps, self._done_ps + duration_ps, first, first + limit) - first + 1)

    @property
    def _done_ps(self) -> int:
        return self._ends_ps[self._num_done - 1] if self._num_done else 0

    def advance(self, num_steps: int) -> bool:
        """Move past steps; return whether a further one was computed."""
        self._num_done += num_steps
        assert self._num_done <= len(self._ends_ps), "no more steps than are known"
        return self._num_done < len(self._ends_ps)
