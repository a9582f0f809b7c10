"""Which of several schedulers needs a worker most, and when a worker should move from one scheduler to another.

    pressure(s, n) = (open requests of s + IDLE_REQUESTS) / n     with n workers; infinite for n = 0

An unattached worker attaches to a scheduler without workers. If there is none, it draws a scheduler with probability
proportional to its pressure, so that workers that lose a scheduler together spread. An attached worker moves to the
scheduler with the highest pressure if that pressure exceeds, by a quarter, the pressure that the move would leave
behind:

    pressure(to, n_to) > MOVE_RATIO * pressure(from, n_from - 1)

Workers do not communicate, but they see the same numbers, so each computes all moves: schedulers give up a worker in
turn, first the one whose remaining pressure is lowest, and each move counts for the next. A draining worker counts at
the scheduler that needs it most. Hence a scheduler gets no more workers than it needs from several others at once, no
move is followed by its reverse while the requests stay the same, the last worker of a scheduler stays, and schedulers
without requests end up with even shares of the workers.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

IDLE_REQUESTS = 16
"""Added to a scheduler's open requests, so that a few requests alone move no worker."""
MOVE_RATIO = 1.25


class Demand(NamedTuple):
    """How much a scheduler needs workers.

    Attributes:
        num_workers: its workers that take new sequences.
        num_open: unfinished requests.
        first_to_leave: the worker that it can best spare; empty: it has none, or one is already leaving.
    """

    num_workers: int
    num_open: int
    first_to_leave: str = ""

    def pressure(self, more_workers: int = 0) -> float:
        """Return the requests per worker if the scheduler had `more_workers` more."""
        num_workers = self.num_workers + more_workers
        return (self.num_open + IDLE_REQUESTS) / num_workers if num_workers > 0 else math.inf


def neediest(demands: Mapping[str, Demand]) -> str:
    """Return the scheduler that needs a worker most; `demands` is not empty.

    Among schedulers without workers, the one with most requests; among equals, the first in the order of `demands`.
    """
    return max(demands, key=lambda name: (demands[name].pressure(), demands[name].num_open))


def drawn(demands: Mapping[str, Demand], at: float) -> str:
    """Return the scheduler that an unattached worker should attach to.

    Args:
        demands: of the schedulers that answered, at least one.
        at: a uniform random number in [0, 1).
    """
    able = {name: demand for name, demand in demands.items() if not demand.num_workers} or demands
    weights = [(demand.num_open + IDLE_REQUESTS) / max(1, demand.num_workers) for demand in able.values()]
    sums = list(accumulate(weights))
    return list(able)[bisect_right(sums, at * sums[-1], hi=len(sums) - 1)]


def better(own: str, worker: str, demands: Mapping[str, Demand]) -> str | None:
    """Return the scheduler that a worker should move to; None: it stays.

    Args:
        own: the scheduler that it is attached to.
        worker: its name; a scheduler gives up one worker at a time, its `first_to_leave`.
        demands: of the schedulers that answered.
    """
    here = demands.get(own)
    return moves(demands).get(own) if here is not None and here.first_to_leave == worker else None


def moves(demands: Mapping[str, Demand]) -> dict[str, str]:
    """Map schedulers whose `first_to_leave` should move to their destinations; the order of `demands` has no effect."""
    after = dict(sorted(demands.items()))

    def add(name: str, num_workers: int) -> None:
        after[name] = after[name]._replace(num_workers=after[name].num_workers + num_workers)

    for demand in demands.values():
        if demand.num_workers and not demand.first_to_leave:
            add(neediest(after), 1)
    found: dict[str, str] = {}
    parting = [name for name, demand in after.items() if demand.first_to_leave]
    for own in sorted(parting, key=lambda name: after[name].pressure(-1)):
        to = neediest(after)
        if after[to].pressure() <= MOVE_RATIO * after[own].pressure(-1):
            break
        found[own] = to
        add(own, -1)
        add(to, 1)
    return found
