"""S-LoRA's synthetic workload, draw for draw, and its summary of a benchmark run, figure for figure.

Source: S-LoRA/S-LoRA c1ddf48, `generate_requests` and `run_exp` (Apache-2.0), rewritten from its described behaviour
and checked against its outputs. With R requests/s over a duration of D seconds it makes n = int(R * D) requests:

* adapter index = int(u * num_adapters), u of density alpha * u ** (alpha - 1) on [0, 1]. alpha = 1 is uniform,
  alpha < 1 favours LOW indices (0.1: very), alpha > 1 favours HIGH ones. This is not Zipf; see `popularity`.
* prompt and output lengths uniform over [low, high), the upper bound excluded.
* gaps gamma distributed with shape 1 / cv ** 2 and scale cv ** 2 / R, so mean 1 / R and coefficient of variation cv.
  Send times are their running sum from the first gap on; the count and not the duration ends the workload.

The draws come from NumPy's legacy generator (MT19937) in exactly this order, each as one array.

The summary, with T the wall time of the run (last response included), f a request's first-token time, "completed" the
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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from lorrery.loadgen.workload.columns import WorkloadColumns


@dataclass(frozen=True, slots=True)
class SloraDraws:
    """The four arrays of a workload, each of shape (n,).

    Attributes:
        adapter_index: int64, 0 <= index < max(num_adapters, 1).
        input_len: int64, prompt tokens.
        output_len: int64, output tokens.
        req_time: float64, seconds from the start, not decreasing.
    """

    adapter_index: npt.NDArray[np.int64]
    input_len: npt.NDArray[np.int64]
    output_len: npt.NDArray[np.int64]
    req_time: npt.NDArray[np.float64]


def draw(
    *,
    num_adapters: int,
    alpha: float,
    req_rate: float,
    cv: float,
    duration: float,
    input_range: tuple[int, int],
    output_range: tuple[int, int],
    seed: int = 42,
) -> SloraDraws:
    """Draw the arrays of a workload; equal arguments give equal bits.

    Args:
        num_adapters: 0 counts as 1 (which should not be named: see `generate_requests`).
        alpha: skew, above 0.
        req_rate: requests/s, above 0.
        cv: coefficient of variation of the gaps, above 0.
        duration: seconds, at least 0.
        input_range: prompt tokens, [low, high).
        output_range: output tokens, [low, high).
        seed: of the legacy generator, 0 <= seed < 2 ** 32.

    Raises:
        ValueError: an argument outside its range.
    """
    for name, value in (("alpha", alpha), ("req_rate", req_rate), ("cv", cv)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    if num_adapters < 0 or duration < 0:
        raise ValueError(f"num_adapters ({num_adapters}) and duration ({duration}) must not be negative")
    for name, (low, high) in (("input_range", input_range), ("output_range", output_range)):
        if not 1 <= low < high:
            raise ValueError(f"{name} is [{low}, {high}); it must begin at 1 or more and not be empty")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; the legacy generator takes 0 to 2**32 - 1")
    legacy = np.random.RandomState(seed)
    n = int(req_rate * duration)
    u = legacy.power(alpha, n)
    adapter_index = (u * max(num_adapters, 1)).astype(np.int64)
    input_len = legacy.randint(input_range[0], input_range[1], n).astype(np.int64)
    output_len = legacy.randint(output_range[0], output_range[1], n).astype(np.int64)
    gaps = legacy.gamma(1 / (cv * cv), cv * cv / req_rate, n)
    return SloraDraws(adapter_index, input_len, output_len, np.cumsum(gaps))


def adapter_name(index: int, adapter_dirs: Sequence[str]) -> str:
    """Name adapter `index` as S-LoRA does: the directories in turn, then the number of completed rounds."""
    rounds, position = divmod(index, len(adapter_dirs))
    return f"{adapter_dirs[position]}-{rounds}"


def generate_requests(
    draws: SloraDraws, *, adapter_dirs: Sequence[str] | None = None, adapters: Sequence[str] | None = None
) -> WorkloadColumns:
    """Make a workload from the draws.

    Args:
        draws: from `draw`.
        adapter_dirs: name index i as S-LoRA does, `adapter_name(i, adapter_dirs)`.
        adapters: name index i `adapters[i]`; must cover all indices. With neither, all use the base model.

    Raises:
        ValueError: both namings at once, or `adapters` is too short.
    """
    if adapter_dirs and adapters:
        raise ValueError("name adapters by adapter_dirs or by adapters, not by both")
    highest = int(draws.adapter_index.max(initial=-1))
    if adapters and highest >= len(adapters):
        raise ValueError(f"adapter index {highest} was drawn; only {len(adapters)} adapters are named")
    names = list(adapters or ())
    if adapter_dirs:
        names = [adapter_name(index, adapter_dirs) for index in range(highest + 1)]
    index = np.arange(len(draws.req_time), dtype=np.int32)
    adapter = draws.adapter_index.astype(np.int32) if names else None
    return WorkloadColumns(index, draws.req_time, draws.input_len, draws.output_len, names, adapter)


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
