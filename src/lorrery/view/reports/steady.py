"""The part of a run that can be compared: its steady state, without ramp-up and drain.

A run begins empty: an open loop fills up, a closed loop sends its first requests all at once, and neither happens
again. It ends with fewer and fewer requests in flight. Both depend on how the run was driven, not on the cluster, so
requests sent within two mean E2E times of the first send, or of the last, are left out.

The rest is too short to estimate its random variation unless it lasts eight mean E2E times: requests that are in flight
together slow each other down, so a run of n mean E2E times has some n independent loads.

If a queue grows, so do E2E times, and no run is long enough. The GPUs are steady all the same: tokens/s and TPOT depend
on the running requests, not on the waiting ones, so their times are those without the queue, and a request counts by
the time of its first token.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorrery.view.reports.requests import Requests

__all__ = ["LEAST_LIVES", "LEFT_OUT_LIVES", "Steady", "steadily_served", "steady"]

Floats = npt.NDArray[np.float64]

LEFT_OUT_LIVES = 2.0
"""Mean E2E times of ramp-up and of drain."""
LEAST_LIVES = 8.0
"""Least length of the steady part in mean E2E times."""


@dataclass(frozen=True, slots=True, eq=False)
class Steady:
    """The steady part of a run.

    Attributes:
        life: mean E2E time of the run's completed requests, or the mean without the queue, seconds.
        at: shape (requests,), when each request was sent, or served.
        first: requests sent, or served, from here on count, seconds.
        last: up to here.
        full_until: the last intended send: until then the load is full, so tokens/s count from `first` to here.
    """

    life: float
    at: Floats
    first: float
    last: float
    full_until: float

    @property
    def counts(self) -> npt.NDArray[np.bool_]:
        """Shape (requests,), whether each request counts."""
        found: npt.NDArray[np.bool_] = (self.at >= self.first) & (self.at <= self.last)
        return found

    @property
    def lives(self) -> float:
        """Its length in mean E2E times; below 0 if nothing is left."""
        return (self.last - self.first) / self.life if self.life > 0 else 0.0

    @property
    def is_long_enough(self) -> bool:
        """Whether it is long enough to estimate random variation."""
        return self.lives >= LEAST_LIVES


def steady(run: Requests) -> Steady | None:
    """Return the steady part of a run; None: nothing completed."""
    return _part(run, run.e2e, run["intended_seconds"])


def steadily_served(run: Requests) -> Steady | None:
    """Return the part of a run in which the GPUs were steady; None: nothing completed, or times are unknown."""
    return _part(run, run.e2e - run["queue_seconds"], run["first_token_seconds"])


def _part(run: Requests, lives: Floats, at: Floats) -> Steady | None:
    known = lives[np.isfinite(lives)]
    if not len(known):
        return None
    life = float(known.mean())
    begin, end = float(np.nanmin(run["intended_seconds"])), float(np.nanmax(run["intended_seconds"]))
    return Steady(life, at, begin + LEFT_OUT_LIVES * life, end - LEFT_OUT_LIVES * life, end)
