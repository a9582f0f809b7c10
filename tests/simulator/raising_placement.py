"""A placement of one's own that raises now and then, and whose choices depend on how often it was asked."""

from collections.abc import Sequence as Many

import numpy as np

from lorrery.scheduler.core.placements.base import Candidate, Choice
from lorrery.scheduler.core.sequence import Sequence
from lorrery.simulator.replay.parts import RecordedCandidate


class RaisesNowAndThen:
    """Goes round, but for each fourth sequence: of these the first meets an error, the next gets a stranger."""

    moves_waiting = False

    def __init__(self, rng: np.random.Generator) -> None:
        del rng
        self._num = 0

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        self._num += 1
        chosen = candidates[(self._num + candidates[0].load) % len(candidates)]
        if self._num % 8 == 4:
            raise ZeroDivisionError("the price of sugar")
        return Choice(RecordedCandidate("stranger", {}) if self._num % 8 == 0 else chosen, "its turn")
