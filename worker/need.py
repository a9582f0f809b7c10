"""Which of several schedulers needs a worker most, and when it is worth to move from one to another.

    pressure(s, n) = (open requests of s + IDLE_REQUESTS) / n     with n workers; without any it is infinite

A worker that looks for a scheduler attaches to one without workers, or else draws one, each as likely as its pressure
is high: workers that have lost a scheduler together do not all go to the same. One that has a scheduler moves from it
to the one with the highest pressure if that pressure is higher, by a quarter, than what it leaves behind:

    pressure(to, n_to) > MOVE_RATIO * pressure(from, n_from - 1)

Workers do not talk to one another, but know the same numbers, so each works out who else moves: schedulers part with a
worker in turn, first the one that keeps the lowest pressure, and each move counts for the next. What drains now counts
where it is needed most. So a scheduler gets no more workers than it needs from several at once, no move is followed by
its reverse while the requests stay what they are, the last worker of a scheduler stays, and schedulers without requests
come to share workers evenly.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

IDLE_REQUESTS = 16
"""A scheduler counts as if it had so many requests more: a few of them move nobody."""
MOVE_RATIO = 1.25


class Demand(NamedTuple):
    """How much a scheduler needs workers.

    Attributes:
        num_workers: that it has and that take new sequences.
        num_open: requests that have not ended.
        first_to_leave: the worker that it would miss least; empty: it has none, or one is leaving already.
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


def drawn(demands: Mapping[str, Demand], at: float) -> str:
    """Return the scheduler that a worker without one should attach to.

    Args:
        demands: of the schedulers that answer, at least one.
        at: drawn evenly from [0, 1).
    """
    able = {name: demand for name, demand in demands.items() if not demand.num_workers} or demands
    weights = [(demand.num_open + IDLE_REQUESTS) / max(1, demand.num_workers) for demand in able.values()]
    sums = list(accumulate(weights))
    return list(able)[bisect_right(sums, at * sums[-1], hi=len(sums) - 1)]


def better(own: str, worker: str, demands: Mapping[str, Demand]) -> str | None:
    """Return the scheduler that a worker should move to; None: it stays.

    Args:
        own: the scheduler that it is attached to.
        worker: its name; a scheduler parts with one worker at a time, the one that it names.
        demands: of the schedulers that answer.
    """
    here = demands.get(own)
    return moves(demands).get(own) if here is not None and here.first_to_leave == worker else None


def moves(demands: Mapping[str, Demand]) -> dict[str, str]:
    """Return where each scheduler's first worker to leave should go, of those that should; the same in any order."""
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
