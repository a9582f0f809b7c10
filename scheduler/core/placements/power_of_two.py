"""Power of two choices: draw two workers at random, take the less loaded one (Mitzenmacher, 1996).

Nearly as even as looking at all workers, at the price of looking at two; and several schedulers that do this do not all
flood the same worker.
"""

from collections.abc import Sequence as Many

import numpy as np

from lorrery.scheduler.core.placements.base import Candidate, Choice, least_loaded
from lorrery.scheduler.core.placements.draw import Draw
from lorrery.scheduler.core.sequence import Sequence


class PowerOfTwo:
    """See the module.

    Args:
        rng: draws the two.
    """

    moves_waiting = True

    def __init__(self, rng: np.random.Generator) -> None:
        self._draw = Draw(rng)

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Draw two workers and choose the less loaded."""
        pair = [candidates[index] for index in sorted(self._draw.some(2, len(candidates)))]
        chosen = least_loaded(pair)
        others = ", ".join(f"{candidate.name} with {candidate.load}" for candidate in pair if candidate is not chosen)
        return Choice(chosen, f"load {chosen.load}" + (f"; the other was {others}" if others else ""))
