"""How far the mean or a quantile of one run would change by chance, told from that run alone.

Requests are not independent: neighbours share a queue and a batch, and those in flight together share a load. What
counts is the power of slow fluctuations, those that a run does not average out. A statistic is written as the mean of
its *influence values*, one of each request in order of the sends,

    mean      x_i - mean
    quantile  (p - [x_i <= q]) / f(q)        f: the density at the quantile q of level p

and their long-run variance is the mean power of the first B cosines over the run (equal-weighted cosines: Mueller 2007;
recommended by Lazarus, Lewis, Stock and Watson, "HAR Inference: Recommendations for Practice", 2018):

    c_j = sqrt(2)/n * sum_i influence_i * cos(pi * j * (i + 1/2) / n)        variance of the statistic = mean_j c_j^2

The estimate has B degrees of freedom, so an interval takes Student's t with B of them, and few cosines make an interval
wider, not wrong. Half a period of the fastest should be four mean E2E times or more: faster fluctuations average out,
and their power says nothing about the slow ones.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Estimate", "degrees_of_difference", "drifts", "influence", "spread", "student"]

Floats = npt.NDArray[np.float64]

_NORMAL = {0.95: 1.959964, 0.99: 2.575829}
"""Two-sided quantiles of the normal distribution, by the share inside."""
_PARTS = 1024
"""A longer series is summed to so many parts: 12 cosines do not see the difference."""
_WINDOW = 0.05
"""Half of the ranks over which the density at a median is taken; in a tail half of the tail, if that is less."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of one run.

    Attributes:
        variance: of the value, over runs that differ by chance alone.
        degrees: of freedom that the variance has.
    """

    value: float
    variance: float
    degrees: float


def influence(values: Floats, level: float | None) -> tuple[float, Floats]:
    """Compute a statistic of the known values, and the influence values of all.

    Args:
        values: shape (n,), NaN where not known; one at least is.
        level: of a quantile, between 0 and 1; None: the mean.

    Returns:
        The statistic, and shape (n,), whose mean is 0: how much each value moves it; 0 where not known.
    """
    known = np.isfinite(values)
    finite = values[known]
    if level is None:
        value = float(finite.mean())
        each = finite - value
    else:
        ordered = np.sort(finite)
        window = min(_WINDOW, (1 - level) / 2, level / 2)
        low, value, high = np.quantile(ordered, [level - window, level, level + window]).tolist()
        below = finite <= value
        each = (float(below.mean()) - below) * ((high - low) / (2 * window))
    found = np.zeros(len(values))
    found[known] = each * (len(values) / len(finite))
    return value, found


def spread(value: float, each: Floats, cosines: int) -> Estimate:
    """Estimate the variance of a statistic from its influence values, in order of time."""
    return Estimate(value, float(_powers(each, cosines).mean()), cosines)


def drifts(each: Floats, cosines: int) -> bool:
    """Tell whether a mean has a trend: the slowest cosine has more power than the others explain, at 1 %.

    Args:
        each: influence values of the mean, in order of time; a percentile's turn a trend into a step.
        cosines: 2 or more.
    """
    powers = _powers(each, cosines)
    others = float(powers[1:].mean())
    return bool(powers[0] > student(0.99, len(powers) - 1) ** 2 * others)


def _powers(each: Floats, cosines: int) -> Floats:
    size = len(each)
    parts = _PARTS if size > 2 * _PARTS else size
    sums = np.bincount(np.arange(size) * parts // size, weights=each, minlength=parts)
    at = (np.arange(len(sums)) + 0.5) / len(sums)
    waves = np.cos(np.pi * np.arange(1, cosines + 1)[:, None] * at)
    found: Floats = ((np.sqrt(2.0) / size * (waves @ sums)) ** 2).astype(np.float64)
    return found


def student(inside: float, degrees: float) -> float:
    """Return the two-sided quantile of Student's t, within 1 % from 4 degrees on (Abramowitz and Stegun, 26.7.5)."""
    z = _NORMAL[inside]
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def degrees_of_difference(base: Estimate, other: Estimate) -> float:
    """Return the degrees of freedom of the sum of two variances (Welch 1947, Satterthwaite 1946)."""
    total = base.variance + other.variance
    parts = base.variance**2 / base.degrees + other.variance**2 / other.degrees
    return total**2 / parts if parts > 0 else base.degrees + other.degrees
