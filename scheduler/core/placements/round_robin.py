"""Round robin: each worker in turn, in order of attaching, whatever its load."""

from collections.abc import Sequence as Many

from lorrery.scheduler.core.placements.base import Candidate, Choice
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class RoundRobin:
    """See the module."""

    def __init__(self) -> None:
        self._num_placed = 0

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose the next worker."""
        chosen = candidates[self._num_placed % len(candidates)]
        self._num_placed += 1
        return Choice(chosen, f"turn {self._num_placed}")
