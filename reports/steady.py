"""Which part of a run can be compared: its steady state, without ramp-up and drain.

A run begins empty: an open loop fills up, a closed loop sends its first requests all at once, and neither happens
again. It ends with fewer and fewer requests in flight. Both depend on how the run was driven, not on the cluster, so
what was sent within two mean E2E times of the first send, or of the last, is left out.

What is left is too short to tell how far it would change by chance unless it lasts eight mean E2E times: requests that
are in flight together slow each other down, so a run of n mean E2E times has some n independent loads.

Where a queue grows, E2E times do, and no run is long enough. What the GPUs do is steady all the same: tokens/s and TPOT
depend on who is served, not on who waits, so their times are those without the queue, and what counts is when the first
token came.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorrery.reports.requests import Requests

__all__ = ["LEAST_LIVES", "LEFT_OUT_LIVES", "Steady", "steadily_served", "steady"]

Floats = npt.NDArray[np.float64]

LEFT_OUT_LIVES = 2.0
"""Mean E2E times that ramp-up and drain take, each."""
LEAST_LIVES = 8.0
"""Mean E2E times that the steady part lasts at least."""


@dataclass(frozen=True, slots=True, eq=False)
class Steady:
    """The steady part of a run.

    Attributes:
        life: mean E2E time of the run's completed requests, or the mean without the queue, seconds.
        at: shape (requests,), when each request was sent, or served.
        first: what was sent, or served, from here on counts, seconds.
        last: and up to here.
        full_until: the last intended send: until then the load is full, so tokens/s count from `first` to here.
    """

    life: float
    at: Floats
    first: float
    last: float
    full_until: float

    @property
    def counts(self) -> npt.NDArray[np.bool_]:
        """Shape (requests,), which requests count."""
        found: npt.NDArray[np.bool_] = (self.at >= self.first) & (self.at <= self.last)
        return found

    @property
    def lives(self) -> float:
        """How many mean E2E times it lasts; below 0 where nothing is left."""
        return (self.last - self.first) / self.life if self.life > 0 else 0.0

    @property
    def is_long_enough(self) -> bool:
        """Whether what changes by chance can be told from it."""
        return self.lives >= LEAST_LIVES


def steady(run: Requests) -> Steady | None:
    """Find the steady part of a run; None: nothing completed."""
    return _part(run, run.e2e, run["intended_seconds"])


def steadily_served(run: Requests) -> Steady | None:
    """Find the part of a run in which the GPUs were steady; None: nothing completed, or when is not known."""
    return _part(run, run.e2e - run["queue_seconds"], run["first_token_seconds"])


def _part(run: Requests, lives: Floats, at: Floats) -> Steady | None:
    known = lives[np.isfinite(lives)]
    if not len(known):
        return None
    life = float(known.mean())
    begin, end = float(np.nanmin(run["intended_seconds"])), float(np.nanmax(run["intended_seconds"]))
    return Steady(life, at, begin + LEFT_OUT_LIVES * life, end - LEFT_OUT_LIVES * life, end)
