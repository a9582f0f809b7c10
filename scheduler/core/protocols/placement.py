"""Who chooses the worker."""

from collections.abc import Sequence as Many
from typing import Protocol

from lorrery.scheduler.core.placements.base import Choice
from lorrery.scheduler.core.placements.candidate import Candidate
from lorrery.scheduler.core.sequence import Sequence


class Placement(Protocol):
    """Chooses a worker, by the candidates' figures, what it chose before, and the generator that it was made with.

    With an attribute `moves_waiting` that is true, what it has placed may move to another worker while it waits, if it
    would start there first (`core.balance`). Candidates keep the figures from `pace` on only for a placement with an
    attribute `predicts` that is true; others that read them are told so by an error. One that predicts, or has an
    attribute `asks_all` that is true, is taken to read what changes with each step of all candidates, so that a driver
    whose replicas lag behind its clock brings them all up to date at once, and not each when it is read.
    """

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose one of the candidates, of which there is at least one, in order of attaching.

        It may only look at what it is handed, and changes nothing but its own state.
        """
        ...
