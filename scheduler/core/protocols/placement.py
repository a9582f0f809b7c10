"""The protocol of placements."""

from collections.abc import Sequence as Many
from typing import Protocol

from lorrery.scheduler.core.placements.base import Choice
from lorrery.scheduler.core.placements.candidate import Candidate
from lorrery.scheduler.core.sequence import Sequence


class Placement(Protocol):
    """Chooses a worker, by the candidates' figures, its earlier choices, and the generator that it was made with.

    If it has a true attribute `moves_waiting`, waiting sequences that it has placed may move to another worker where
    they would start earlier. Candidates keep the figures from `pace` on only for a placement with a true
    attribute `predicts`; for others, reading them is an error that says so. A placement with `predicts`, or with a
    true attribute `asks_all`, is taken to read figures that change with each step of all candidates, so that a driver
    whose replicas lag behind its clock brings them all up to date at once, and not each one when it is read.
    """

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose one of the candidates, of which there is at least one, in order of attaching.

        It must not change its arguments, only its own state.
        """
        ...
