"""Which part of a run can be compared: its steady state, without ramp-up and drain.

A run begins empty: an open loop fills up, a closed loop sends its first requests all at once, and neither happens
again. It ends with fewer and fewer requests in flight. Both depend on how the run was driven, not on the cluster, so
what was sent within two mean E2E times of the first send, or of the last, is left out.

What is left is too short to tell how far it would change by chance unless it lasts eight mean E2E times: requests that
are in flight together slow each other down, so a run of n mean E2E times has some n independent loads.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorrery.reports.requests import Requests

__all__ = ["LEAST_E2E", "LEFT_OUT_E2E", "Steady", "steady"]

LEFT_OUT_E2E = 2.0
"""Mean E2E times that ramp-up and drain take, each."""
LEAST_E2E = 8.0
"""Mean E2E times that the steady part lasts at least."""


@dataclass(frozen=True, slots=True, eq=False)
class Steady:
    """The steady part of a run.

    Attributes:
        e2e: mean of the run's completed requests, seconds.
        first: intended sends from here on count, seconds.
        last: and up to here.
        full_until: the last intended send: until then the load is full, so tokens/s count from `first` to here.
        sent: shape (requests,), which requests count.
    """

    e2e: float
    first: float
    last: float
    full_until: float
    sent: npt.NDArray[np.bool_]

    @property
    def lengths(self) -> float:
        """How many mean E2E times it lasts; below 0 where nothing is left."""
        return (self.last - self.first) / self.e2e if self.e2e > 0 else 0.0


def steady(run: Requests) -> Steady | None:
    """Find the steady part of a run; None: nothing completed."""
    e2e, intended = run.e2e[run.completed], run["intended_seconds"]
    e2e = e2e[np.isfinite(e2e)]
    if not len(e2e):
        return None
    mean = float(e2e.mean())
    begin, end = float(np.nanmin(intended)), float(np.nanmax(intended))
    first, last = begin + LEFT_OUT_E2E * mean, end - LEFT_OUT_E2E * mean
    return Steady(mean, first, last, end, (intended >= first) & (intended <= last))
