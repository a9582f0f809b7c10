"""Simple synthetic workloads (an arrival process, uniform lengths), and what can be done to any workload in time.

Times are seconds from the start. Poisson and gamma processes begin with a gap, the constant one at 0.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.request import WorkloadRequest

__all__ = ["constant", "fitting", "gamma", "limit", "poisson", "scale", "synthetic"]


def poisson(rate: float, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw arrival times with exponential gaps of mean 1 / rate; shape (num_requests,), not decreasing.

    Raises:
        ValueError: rate not above 0.
    """
    return gamma(rate, 1.0, num_requests, rng)


def gamma(rate: float, cv: float, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw arrival times with gamma gaps of mean 1 / rate and coefficient of variation cv; shape (num_requests,).

    cv = 1 is Poisson, above 1 comes in bursts, towards 0 is even.

    Raises:
        ValueError: rate or cv not above 0.
    """
    if not (rate > 0 and cv > 0):
        raise ValueError(f"rate is {rate}, cv is {cv}; both must be above 0")
    return np.cumsum(rng.gamma(1 / (cv * cv), cv * cv / rate, num_requests))


def constant(rate: float, num_requests: int) -> npt.NDArray[np.float64]:
    """Give arrival times 0, 1 / rate, 2 / rate ...; shape (num_requests,).

    Raises:
        ValueError: rate not above 0.
    """
    if not rate > 0:
        raise ValueError(f"rate is {rate}; it must be above 0")
    return np.arange(num_requests, dtype=np.float64) / rate


def synthetic(
    at_seconds: npt.NDArray[np.float64],
    input_range: tuple[int, int],
    output_range: tuple[int, int],
    rng: np.random.Generator,
) -> list[WorkloadRequest]:
    """Make requests of the given times with lengths uniform over [low, high]; low = high is a fixed length.

    Unlike S-LoRA's generator, `high` is included.

    Raises:
        ValueError: an empty range, or one that begins below 1.
    """
    for name, (low, high) in (("input_range", input_range), ("output_range", output_range)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} is {low}:{high}; it must begin at 1 or more and not be empty")
    n = len(at_seconds)
    prompts = rng.integers(input_range[0], input_range[1], n, endpoint=True)
    outputs = rng.integers(output_range[0], output_range[1], n, endpoint=True)
    columns = zip(at_seconds.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [WorkloadRequest(index, *row) for index, row in enumerate(columns)]


def scale(workload: Sequence[WorkloadRequest], speed_up: float) -> list[WorkloadRequest]:
    """Play the workload `speed_up` times as fast: send times are divided by it.

    Raises:
        ValueError: speed_up not above 0.
    """
    if not (speed_up > 0 and math.isfinite(speed_up)):
        raise ValueError(f"speed_up is {speed_up}; it must be above 0")
    if speed_up == 1:
        return list(workload)
    return [replace(request, at_seconds=request.at_seconds / speed_up) for request in workload]


def limit(
    workload: Sequence[WorkloadRequest], num_requests: int | None = None, duration_seconds: float | None = None
) -> list[WorkloadRequest]:
    """Keep the first `num_requests`, and of these the ones to be sent before `duration_seconds`."""
    kept = workload if num_requests is None else workload[:num_requests]
    return [request for request in kept if duration_seconds is None or request.at_seconds < duration_seconds]


def fitting(workload: Sequence[WorkloadRequest], max_input_len: int, max_total_len: int) -> list[WorkloadRequest]:
    """Keep the requests whose prompt, and prompt and output together, are within a cluster's limits (inclusive)."""
    return [
        request
        for request in workload
        if request.prompt_tokens <= max_input_len and request.prompt_tokens + request.output_tokens <= max_total_len
    ]
