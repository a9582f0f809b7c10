"""How few replicas meet a service level: which numbers to try, and when to stop.

Each trial is a whole simulated run, so few are made: from a first guess in steps of 1, 2, 4 ... until one number meets
the level and one misses it, then halfway between the two until they are neighbours. This takes for granted that a
number above one that meets the level meets it too.
"""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Trial", "fewest", "search"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated run, and whether it met the level.

    Attributes:
        num_replicas: that served it.
        ttft_p99: seconds from arrival to first token, waiting included.
        tpot_p99: seconds per further token.
        num_failed: requests that were refused, dropped or timed out.
        met: whether it met the level; with a failed request it did not.
    """

    num_replicas: int
    ttft_p99: float
    tpot_p99: float
    num_failed: int
    met: bool


def search(run: Callable[[int], Trial], first: int, least: int, most: int) -> list[Trial]:
    """Try numbers of replicas until the smallest that meets the level is known; return the trials in order.

    Args:
        run: makes a trial with so many replicas.
        first: where to begin, from `least` to `most`.
        least: the smallest number that can be.
        most: the largest number worth trying. If it misses, nothing met the level.
    """
    trials = [run(first)]
    met = first if trials[0].met else most + 1
    missed = least - 1 if trials[0].met else first
    step = 1
    while missed + 1 < met:
        if missed < least:
            number = max(met - step, least)
        elif met > most:
            number = min(missed + step, most)
        else:
            number = (missed + met) // 2
        step *= 2
        trials.append(run(number))
        if trials[-1].met:
            met = number
        else:
            missed = number
    return trials


def fewest(trials: list[Trial]) -> int | None:
    """Return the smallest number of replicas that met the level; None if none did."""
    return min((trial.num_replicas for trial in trials if trial.met), default=None)
