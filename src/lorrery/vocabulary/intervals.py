"""The mean over independent runs, and the interval in which it lies with 95 %.

Runs with different seeds draw different arrivals and lengths. Of n values x with the standard deviation s,

    mean -+ t * s / sqrt(n)        t: 97.5 % of Student's t with n - 1 degrees of freedom

Values should be roughly normal, as means and quantiles over many requests are. Two candidates with the same seeds had
the same requests, so the interval is that of the differences, seed by seed: what the draw does to both cancels.
"""

import math
from collections.abc import Iterable

__all__ = ["is_clear", "mean_and_margin", "student"]

_NORMAL = {0.95: 1.959964, 0.99: 2.575829}
"""Two-sided quantiles of the normal distribution, by the share inside."""


def mean_and_margin(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean of the finite values, and half of its 95 % interval.

    The margin is infinite for one value, and both are NaN for none.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return math.nan, math.nan
    mean, degrees = sum(known) / len(known), len(known) - 1
    if not degrees:
        return mean, math.inf
    variance = sum((value - mean) ** 2 for value in known) / degrees
    return mean, student(0.95, degrees) * math.sqrt(variance / len(known))


def is_clear(differences: Iterable[float]) -> bool:
    """Return whether the 95 % interval of the mean difference does not have 0 in it."""
    mean, margin = mean_and_margin(differences)
    return abs(mean) > margin


def student(inside: float, degrees: float) -> float:
    """Return the two-sided quantile of Student's t; beyond 2 degrees by Abramowitz and Stegun, 26.7.5, within 1 %.

    Args:
        inside: 0.95, or 0.99, which is accurate from 3 degrees on or for 1 or 2.
        degrees: of freedom, at least 1.
    """
    if degrees == 1:
        return math.tan(math.pi * inside / 2)
    if degrees == 2:
        return inside * math.sqrt(2 / (1 - inside**2))
    z = _NORMAL[inside]
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * degrees**4)
    )
