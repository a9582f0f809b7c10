"""How far the mean or a quantile of a run's steady state would change by chance, estimated from that run alone.

Requests are not independent: neighbours share a queue and a batch, and those in flight together share a load. Relevant
is the power of slow fluctuations, which a run does not average out. Of n values in order of time, here x_i - mean, or
[x_i <= q] - p at the quantile q of level p, the long-run variance of the mean is the mean power of the first B cosines
over the run (equal-weighted cosines: Mueller 2007; recommended by Lazarus, Lewis, Stock and Watson, "HAR Inference:
Recommendations for Practice", 2018):

    c_j = sqrt(2)/n * sum_i value_i * cos(pi * j * (i + 1/2) / n)        variance of the mean = mean_j c_j^2

It has B degrees of freedom, so limits use Student's t with B of them, and few cosines make an interval wider, not
wrong. Half a period of the fastest should be at least six mean E2E times: faster fluctuations average out, and their
power says nothing about the slow ones.

A quantile has its limits where the share of values below it would be p plus or minus chance (Woodruff, "Confidence
Intervals for Medians and Other Position Measures", 1952). That needs no density, which cannot be estimated well with
gaps, or with values shared by many requests. The share varies on the scale of logits, so that it stays between 0 and 1
(Korn and Graubard 1999; `xlogit` of Lumley's R package survey):

    logit(p) -+ t * sqrt(mean_j c_j^2) / (p (1 - p))

In a tail few peaks of the load make all high values, which shares within one run underestimate. There a limit is no
nearer than by c_j / f(q), f being the density about q.

Runs with the same requests are compared by differences of c_j, of quantiles c_j / f(q); what affects both equally
cancels.

Only the steady state of a run can be compared, without ramp-up and drain.

A run begins empty: an open loop fills up, a closed loop sends its first requests all at once, and neither happens
again. It ends with fewer and fewer requests in flight. Both depend on how the run was driven, not on the cluster, so
requests sent within two mean E2E times of the first send, or of the last, are left out.

The rest is too short to estimate its random variation unless it lasts eight mean E2E times: requests that are in flight
together slow each other down, so a run of n mean E2E times has some n independent loads.

If a queue grows, so do E2E times, and no run is long enough. The GPUs are steady all the same: tokens/s and TPOT depend
on the running requests, not on the waiting ones, so their times are those without the queue, and a request counts by
the time of its first token.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorrery.view.reports.requests import Requests
from lorrery.vocabulary.intervals import student

__all__ = [
    "LEAST_LIVES",
    "LEFT_OUT_LIVES",
    "Estimate",
    "Steady",
    "difference",
    "drifts",
    "estimate",
    "estimate_mean",
    "steadily_served",
    "steady",
]

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


_PARTS = 1024
"""A longer series is summed to this many parts: 12 cosines do not notice the difference."""
_WINDOW = 0.05
"""Half of the ranks over which the density at a median is estimated; in a tail half of the tail, if that is less."""
_TAIL = 0.95
"""Quantiles above it, or as far below, are in a tail."""


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A statistic of one run.

    Attributes:
        waves: shape (cosines,): c_j of a mean, c_j / f(q) of a quantile.
    """

    value: float
    waves: Floats

    @property
    def degrees(self) -> int:
        """Degrees of freedom of its variance."""
        return len(self.waves)

    def limits(self, times: float) -> tuple[float, float]:
        """Return the statistic minus and plus `times` standard deviations."""
        half = times * _root_mean_square(self.waves)
        return self.value - half, self.value + half


@dataclass(frozen=True, slots=True, eq=False)
class _Quantile(Estimate):
    """A quantile of one run.

    Attributes:
        level: between 0 and 1.
        deviation: of the share of values up to it, on the scale of logits.
        ordered: all values.
    """

    level: float
    deviation: float
    ordered: Floats

    def limits(self, times: float) -> tuple[float, float]:
        middle, shift = math.log(self.level / (1 - self.level)), times * self.deviation
        shares = [(1 + math.tanh((middle + change) / 2)) / 2 for change in (-shift, shift)]
        low, high = np.quantile(self.ordered, shares).tolist()
        if not 1 - _TAIL <= self.level <= _TAIL:
            least, most = Estimate.limits(self, times)
            return min(low, least), max(high, most)
        return low, high


def estimate(values: Floats, level: float | None, cosines: int) -> Estimate:
    """Estimate a statistic of the known values.

    Args:
        values: shape (n,), in order of time; NaN if unknown; at least one is known.
        level: of a quantile, between 0 and 1; None: the mean.
        cosines: 1 or more.
    """
    known = np.isfinite(values)
    finite = values[known]
    if level is None:
        return estimate_mean(float(finite.mean()), _centred(known, finite), cosines)
    ordered = np.sort(finite)
    window = min(_WINDOW, (1 - level) / 2, level / 2)
    low, value, high = np.quantile(ordered, [level - window, level, level + window]).tolist()
    waves = _waves(_centred(known, (finite <= value).astype(np.float64)), cosines)
    deviation = _root_mean_square(waves) / (level * (1 - level))
    return _Quantile(value, -waves * ((high - low) / (2 * window)), level, deviation, ordered)


def estimate_mean(value: float, each: Floats, cosines: int) -> Estimate:
    """Estimate a statistic that is a mean up to a constant.

    Args:
        value: of the statistic.
        each: shape (n,), contribution of each part of the run; their mean is 0.
        cosines: 1 or more.
    """
    return Estimate(value, _waves(each, cosines))


def _centred(known: npt.NDArray[np.bool_], finite: Floats) -> Floats:
    found = np.zeros(len(known))
    found[known] = (finite - finite.mean()) * (len(known) / len(finite))
    return found


def _root_mean_square(values: Floats) -> float:
    return math.sqrt(float((values**2).mean()))


def difference(base: Estimate, other: Estimate, *, paired: bool) -> tuple[float, float]:
    """Return the 95 % interval of `other - base`.

    For independent runs it follows from the limits of both (method of variance estimates recovery: Zou and Donner
    2008), which for means is the usual interval; for pairs from the differences of their waves.

    Args:
        base: of one run.
        other: the same statistic of another run.
        paired: whether both have the same requests, in the same order, and as many cosines.
    """
    change = other.value - base.value
    if paired:
        return Estimate(change, other.waves - base.waves).limits(student(0.95, base.degrees))
    times = student(0.95, _degrees(base, other))
    (least, most), (low, high) = base.limits(times), other.limits(times)
    below = math.hypot(other.value - low, most - base.value)
    above = math.hypot(high - other.value, base.value - least)
    return change - below, change + above


def _degrees(base: Estimate, other: Estimate) -> float:
    """Return the degrees of freedom of the sum of two variances (Welch 1947, Satterthwaite 1946)."""
    first, second = (((high - low) / 2) ** 2 for low, high in (base.limits(1.0), other.limits(1.0)))
    parts = first**2 / base.degrees + second**2 / other.degrees
    return (first + second) ** 2 / parts if parts > 0 else base.degrees + other.degrees


def drifts(values: Floats, cosines: int) -> bool:
    """Return whether a mean has a trend: the slowest cosine has more power than the others explain, at 1 %.

    Args:
        values: shape (n,), in order of time; NaN if unknown; at least one is known.
        cosines: 2 or more.
    """
    found = estimate(values, None, cosines).waves ** 2
    others = float(found[1:].mean())
    return bool(found[0] > student(0.99, len(found) - 1) ** 2 * others)


def _waves(each: Floats, cosines: int) -> Floats:
    size = len(each)
    parts = _PARTS if size > 2 * _PARTS else size
    sums = np.bincount(np.arange(size) * parts // size, weights=each, minlength=parts)
    at = (np.arange(len(sums)) + 0.5) / len(sums)
    waves = np.cos(np.pi * np.arange(1, cosines + 1)[:, None] * at)
    found: Floats = (np.sqrt(2.0) / size * (waves @ sums)).astype(np.float64)
    return found
