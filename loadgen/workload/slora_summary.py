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

`strip_throughput` means nothing on runs not much longer than 20 s; it is negative where the warm-up counts more
requests than completed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["SLO_SECONDS", "WARMUP_SECONDS", "SloraSummary", "slora_summary"]

SLO_SECONDS = 6.0
"""First-token time from which on a request is worth nothing to S-LoRA."""
WARMUP_SECONDS = 10.0
"""What `strip_throughput` cuts off at either end."""


@dataclass(frozen=True, slots=True)
class SloraSummary:
    """The figures under S-LoRA's names; None where there is nothing to divide by."""

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
    per_request: Sequence[tuple[int, int, float, float | None]],
    benchmark_time: float,
    *,
    req_rate: float,
    warmup_time: float = WARMUP_SECONDS,
    warmup_num: int | None = None,
) -> SloraSummary:
    """Compute the figures.

    Args:
        per_request: (prompt tokens, output tokens, E2E seconds, first-token seconds or None if dropped) of each.
        benchmark_time: T, seconds.
        req_rate: requests/s.
        warmup_time: seconds.
        warmup_num: requests; None: int(warmup_time * req_rate).
    """
    if warmup_num is None:
        warmup_num = int(warmup_time * req_rate)
    completed = [
        (prompt, output, e2e, first) for prompt, output, e2e, first in per_request if first is not None and output > 0
    ]
    stripped_time = benchmark_time - 2 * warmup_time
    worth = [1 - first**2 / SLO_SECONDS**2 for *_, first in completed if first < SLO_SECONDS]
    return SloraSummary(
        total_time=benchmark_time,
        num_abort=len(per_request) - len(completed),
        throughput=_ratio(len(completed), benchmark_time),
        strip_throughput=_ratio(len(completed) - 2 * warmup_num, stripped_time),
        avg_latency=_mean([e2e for _, _, e2e, _ in completed]),
        avg_per_token_latency=_mean([e2e / (prompt + output) for prompt, output, e2e, _ in completed]),
        avg_per_output_token_latency=_mean([e2e / output for _, output, e2e, _ in completed]),
        avg_first_token_latency=_mean([first for *_, first in completed]),
        avg_satisfaction=_ratio(float(np.sum(worth)), len(per_request)),
        avg_attainment=_ratio(len(worth), len(per_request)),
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
