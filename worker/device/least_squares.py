"""Least squares by Levenberg and Marquardt's method, with slopes by finite differences.

For a handful of unknowns, as in a fit of constants. (numpy has linear least squares only, and scipy is not a
dependency.)
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MOST_ITERATIONS = 30
_DONE = 1e-5
"""Relative gain of an iteration below which the fit has converged."""
APART = 1e-4
"""Step of an unknown for a slope."""


def least_squares(errors: Callable[[Floats], Floats], start: Floats, *, apart: float = APART) -> tuple[Floats, float]:
    """Return where the sum of squares is least, and that sum.

    Args:
        errors: maps unknowns to errors, always the same number of them.
        start: where to begin; no step moves an unknown by more than 1.
        apart: step of an unknown for a slope: larger than what rounding hides.
    """
    at, now = start, errors(start)
    damping = 1e-2
    for _ in range(_MOST_ITERATIONS):
        change = slopes(errors, at, now, apart)
        square, down = change.T @ change, change.T @ now
        while damping < 1e6:
            step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -down)
            then = errors(at + np.clip(step, -1.0, 1.0))
            if then @ then < now @ now:
                break
            damping *= 4
        else:
            break
        gain = 1 - (then @ then) / (now @ now)
        at, now, damping = at + np.clip(step, -1.0, 1.0), then, damping / 8
        if gain < _DONE:
            break
    return at, float(now @ now)


def slopes(errors: Callable[[Floats], Floats], at: Floats, now: Floats, apart: float = APART) -> Floats:
    """Return the derivative of each error (row) by each unknown (column); `now` is `errors(at)`."""
    found = np.empty((len(now), len(at)))
    for index in range(len(at)):
        moved = at.copy()
        moved[index] += apart
        found[:, index] = (errors(moved) - now) / apart
    return found
