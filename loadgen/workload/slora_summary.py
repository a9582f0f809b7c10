"""S-LoRA's own summary of a benchmark run, figure for figure.

Source: S-LoRA/S-LoRA c1ddf48, `run_exp` (Apache-2.0), rewritten from its described behaviour and checked against its
outputs. With T the wall time of the run (last response included), f a request's first-token time, "completed" the
requests that have one, and "all" completed and aborted ones together (seconds, requests/s, fractions):

    throughput                     completed / T
    strip_throughput               (completed - 2 * warmup_num) / (T - 2 * warmup_time), warmup_num = int(10 * rate)
    avg_latency                    mean over completed of E2E
    avg_per_token_latency          mean over completed of E2E / (prompt + output tokens)
    avg_per_output_token_latency   mean over completed of E2E / output tokens (queueing included: normalised TPOT)
    avg_first_token_latency        mean over completed of f
    avg_satisfaction               mean over all of 1 - f**2 / 36 where f < 6, else 0
    avg_attainment                 mean over all of 1 where f < 6, else 0

`strip_throughput` is meaningless for runs not much longer than 20 s; it is negative if the warm-up counts more requests
than completed.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

__all__ = ["SLO_SECONDS", "WARMUP_SECONDS", "SloraSummary", "slora_summary"]

SLO_SECONDS = 6.0
"""First-token time from which a request has no value for S-LoRA."""
WARMUP_SECONDS = 10.0
"""Time that `strip_throughput` cuts off at either end."""


@dataclass(frozen=True, slots=True)
class SloraSummary:
    """The figures under S-LoRA's names; None if the divisor is zero."""

    total_time: float
    num_abort: int
    throughput: float | None
    strip_throughput: float | None
    avg_latency: float | None
    avg_per_token_latency: float | None
    avg_per_output_token_latency: float | None
    avg_first_token_latency: float | None
    avg_satisfaction: float | None
    avg_attainment: float | None


def slora_summary(
    per_request: ArrayLike,
    benchmark_time: float,
    *,
    req_rate: float,
    warmup_time: float = WARMUP_SECONDS,
    warmup_num: int | None = None,
) -> SloraSummary:
    """Compute the figures.

    Args:
        per_request: shape (n, 4): prompt tokens, output tokens, E2E seconds, first-token seconds or NaN if dropped.
        benchmark_time: T, seconds.
        req_rate: requests/s.
        warmup_time: seconds.
        warmup_num: requests; None: int(warmup_time * req_rate).
    """
    if warmup_num is None:
        warmup_num = int(warmup_time * req_rate)
    rows = np.asarray(per_request, np.float64).reshape(-1, 4)
    completed = ~np.isnan(rows[:, 3]) & (rows[:, 1] > 0)
    prompt, output, e2e, first = (rows if completed.all() else rows[completed]).T
    num_completed = len(first)
    stripped_time = benchmark_time - 2 * warmup_time
    in_time = first[first < SLO_SECONDS]
    return SloraSummary(
        total_time=benchmark_time,
        num_abort=len(rows) - num_completed,
        throughput=_ratio(num_completed, benchmark_time),
        strip_throughput=_ratio(num_completed - 2 * warmup_num, stripped_time),
        avg_latency=_mean(e2e),
        avg_per_token_latency=_mean(e2e / (prompt + output)),
        avg_per_output_token_latency=_mean(e2e / output),
        avg_first_token_latency=_mean(first),
        avg_satisfaction=_ratio(float((1 - in_time**2 / SLO_SECONDS**2).sum()), len(rows)),
        avg_attainment=_ratio(len(in_time), len(rows)),
    )


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
