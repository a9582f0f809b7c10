"""Fits a GPU's kernel constants to measured steps.

Least squares on the logarithm of modelled / measured, by Levenberg and Marquardt's method over the logarithms of the
constants, so that none becomes negative and an error of 5 % counts equally on a short step and a long one. A row counts
with its whole step, and where they were timed separately with its linear part and (less: `ATTENTION_WEIGHT`) its
attention, which separates constants that steps alone do not. A weak pull towards the starting values (`PULL` for a
factor of e) keeps constants that the rows do not determine: a profile without prefills leaves prefill_flops unchanged.

The tile of large matrix products is discrete: each of `GEMM_TILES` is tried, and the best kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lorrery.worker.device.catalogue.hardware import KernelFit
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.profile import ProfileRow
from lorrery.worker.device.roofline import Roofline

Floats = NDArray[np.float64]

PULL = 0.03
ATTENTION_WEIGHT = 0.2
"""An attention that takes 2 % of its step may have a larger error."""
GEMM_TILES = (64, 128, 256)
HOST_CONSTANTS = ("step_ms", "sequence_ms")

_LEAST = 1e-3
"""Starting value of a constant of 0, in its unit."""
_CONSTANTS = (
    "gemm_flops", "gemm_bandwidth", "gemm_us", "elementwise_bandwidth", "elementwise_us",
    "decode_bandwidth", "prefill_flops", "attention_us",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """A row, and the deployment that it was measured on."""

    row: ProfileRow
    deployment: Deployment


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit.

    Attributes:
        fit: the constants.
        host: the CPU's constants by name, if they were fitted too.
    """

    fit: KernelFit
    host: dict[str, float]

    def apply(self, deployment: Deployment) -> Deployment:
        """Return a deployment with these constants."""
        engine = deployment.engine
        if self.host:
            engine = replace(engine, step_ms=self.host["step_ms"], sequence_ms=self.host["sequence_ms"])
        return replace(deployment, gpu=deployment.gpu.with_fit(self.fit), engine=engine)


def calibrate(rows: Sequence[Measured], start: KernelFit, *, host: bool = False) -> Calibration:
    """Fit constants to rows.

    Args:
        rows: measured steps of one GPU, at least one.
        start: initial constants, towards which the fit is pulled.
        host: whether to fit the CPU's `HOST_CONSTANTS` too, for rows that are whole steps of an engine.
    """
    first = rows[0].deployment.engine
    begin = np.array([start.constants[name] for name in _CONSTANTS])
    if host:
        begin = np.append(begin, [getattr(first, name) or 0.5 for name in HOST_CONSTANTS])
    begin = np.log(np.maximum(begin, _LEAST))

    def calibration(logs: Floats, tile: int) -> Calibration:
        values = [float(value) for value in np.exp(logs)]
        found = dict(zip(_CONSTANTS, values[: len(_CONSTANTS)], strict=True))
        fit = KernelFit.of_constants({**found, "gemm_tile": tile})
        return Calibration(fit, dict(zip(HOST_CONSTANTS, values[len(_CONSTANTS) :], strict=False)) if host else {})

    found: list[tuple[float, Calibration]] = []
    for tile in GEMM_TILES:

        def errors(logs: Floats, tile: int = tile) -> Floats:
            return np.append(log_errors(rows, calibration(logs, tile)), PULL * (logs - begin))

        logs, loss = least_squares(errors, begin)
        found.append((loss, calibration(logs, tile)))
    return min(found, key=lambda pair: pair[0])[1]


def log_errors(rows: Sequence[Measured], constants: Calibration) -> Floats:
    """Return ln(modelled / measured) of each measured time, weighted, in the rows' order."""
    models: dict[int, Roofline] = {}
    linear: dict[tuple[int, int], float] = {}
    errors: list[float] = []
    for measured in rows:
        row, key = measured.row, id(measured.deployment)
        if key not in models:
            models[key] = Roofline(constants.apply(measured.deployment))
        model = models[key]
        if row.linear_ms is not None:
            num_tokens = row.num_tokens
            if (key, num_tokens) not in linear:
                linear[key, num_tokens] = model.linear_seconds(num_tokens) * 1e3
            errors.append(np.log(linear[key, num_tokens] / row.linear_ms))
        if row.phase == "linear":
            continue
        if row.attention_ms is not None:
            attention_ms = model.attention_seconds(row.batch()) * 1e3
            errors.append(ATTENTION_WEIGHT * np.log(attention_ms / row.attention_ms))
        if row.step_ms is not None:
            errors.append(np.log(model.step_ps(row.batch()) / 1e9 / row.step_ms))
    return np.array(errors)


_MOST_ITERATIONS = 30
_DONE = 1e-5
"""Relative gain of an iteration below which the fit has converged."""
APART = 1e-4
"""Step of an unknown for a slope."""


def least_squares(
    errors: Callable[[Floats], Floats], start: Floats, *, apart: float = APART, most: int = _MOST_ITERATIONS
) -> tuple[Floats, float]:
    """Return where the sum of squares is least, and that sum, by Levenberg and Marquardt's method.

    Slopes are finite differences. For a handful of unknowns, as in a fit of constants. (numpy has linear least squares
    only, and scipy is not a dependency.)

    Args:
        errors: maps unknowns to errors, always the same number of them.
        start: where to begin; no step moves an unknown by more than 1.
        apart: step of an unknown for a slope: larger than what rounding hides.
        most: iterations.
    """
    at, now = start, errors(start)
    damping = 1e-2
    for _ in range(most):
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


def soften(errors: Floats, soft: float) -> Floats:
    """Return numbers whose squares grow as those of errors up to `soft`, and as their sizes beyond."""
    softened: Floats = np.sign(errors) * soft * np.sqrt(2 * (np.sqrt(1 + (errors / soft) ** 2) - 1))
    return softened


def slopes(errors: Callable[[Floats], Floats], at: Floats, now: Floats, apart: float = APART) -> Floats:
    """Return the derivative of each error (row) by each unknown (column); `now` is `errors(at)`."""
    found = np.empty((len(now), len(at)))
    for index in range(len(at)):
        moved = at.copy()
        moved[index] += apart
        found[:, index] = (errors(moved) - now) / apart
    return found
