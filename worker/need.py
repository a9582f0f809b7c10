"""Which of several schedulers needs a worker most, and when it is worth to move from one to another.

    pressure(s, n) = (open requests of s + IDLE_REQUESTS) / n     with n workers; without any it is infinite

A worker that looks for a scheduler attaches where the pressure is highest. One that has a scheduler moves from it to
the one with the highest pressure if that pressure is higher, by a quarter, than what it leaves behind:

    pressure(to, n_to) > MOVE_RATIO * pressure(from, n_from - 1)

So no move is followed by its reverse while the requests stay what they are, the last worker of a scheduler stays, and
schedulers without requests come to share workers evenly.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

IDLE_REQUESTS = 16
"""A scheduler counts as if it had so many requests more: a few of them move nobody."""
MOVE_RATIO = 1.25


class Demand(NamedTuple):
    """How much a scheduler needs workers.

    Attributes:
        num_workers: that it has and that take new sequences.
        num_open: requests that have not ended.
        first_to_leave: the worker that it would miss least; empty: it has none.
    """

    num_workers: int
    num_open: int
    first_to_leave: str = ""

    def pressure(self, more_workers: int = 0) -> float:
        """Return the requests for each worker, if it had so many more."""
        num_workers = self.num_workers + more_workers
        return (self.num_open + IDLE_REQUESTS) / num_workers if num_workers > 0 else math.inf


def neediest(demands: Mapping[str, Demand]) -> str:
    """Return the scheduler that needs a worker most; there is at least one.

    Of those without workers that with most requests; among equals the first in the order of `demands`.
    """
    return max(demands, key=lambda name: (demands[name].pressure(), demands[name].num_open))


def better(own: str, worker: str, demands: Mapping[str, Demand]) -> str | None:
    """Return the scheduler that a worker should move to; None: it stays.

    Args:
        own: the scheduler that it is attached to.
        worker: its name; a scheduler parts with one worker at a time, the one that it names.
        demands: of the schedulers that answer.
    """
    here = demands.get(own)
    if here is None or here.first_to_leave != worker:
        return None
    to = neediest(demands)
    if to != own and demands[to].pressure() > MOVE_RATIO * here.pressure(-1):
        return to
    return None
