"""Draws the adapter of each request. No public trace has adapters, so the result is synthetic; reports label it so.

Two laws are in use and easily confused. Both give the most popular adapter index 0 where they are skewed:

* Zipf (`zipf_indices`): P(i) proportional to (i + 1) ** -exponent. exponent 0 is uniform, about 1 is usual, larger is
  more skewed. A law of ranks, discrete from the start.
* S-LoRA's `power(alpha)` (`power_indices`): i = int(u * N) with u of density alpha * u ** (alpha - 1), that is
  P(index < k) = (k / N) ** alpha. alpha 1 is uniform, SMALLER is more skewed to index 0, above 1 is skewed to the LAST.

Chen et al., "Punica", MLSys 2024, and S-LoRA (Sheng et al., MLSys 2024) evaluate with skews of these kinds.

Popularity may change while a workload is played. With N adapters, z(i) their Zipf weights by rank i = 0 ... N - 1, and
t a request's time in seconds:

* `Diurnal`: P(i | t) proportional to z(i) * (1 + A * sin(2 pi * (t / T + i / N))). Each adapter has a day of length T,
  and the days of N adapters begin evenly spread. A = 0 is no drift; with A = 1 each is unused once a day.
* `Flash`: between `at` and `at + for` a share of all requests goes to one adapter, the rest as before.
* `Shift`: at regular intervals the ranks move: the adapter of rank i becomes i + by * floor(t / every) modulo N. So the
  most popular one changes at once, and the resident adapters lose their use.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.columns import WorkloadColumns
from lorrery.loadgen.workload.request import WorkloadRequest


def zipf_indices(
    num_adapters: int, num_requests: int, exponent: float, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw adapter indices with P(i) proportional to (i + 1) ** -exponent; shape (num_requests,).

    Raises:
        ValueError: no adapter to draw, or a negative exponent.
    """
    if num_adapters < 1 or exponent < 0:
        raise ValueError(f"num_adapters is {num_adapters} (1 or more), exponent is {exponent} (0 or more)")
    weights = np.arange(1, num_adapters + 1, dtype=np.float64) ** -exponent
    edges = np.cumsum(weights / weights.sum())
    edges[-1] = 1.0
    return np.searchsorted(edges, rng.random(num_requests), side="right").astype(np.int64)


def power_indices(
    num_adapters: int, num_requests: int, alpha: float, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw adapter indices with P(index < k) = (k / N) ** alpha, S-LoRA's law; shape (num_requests,).

    Raises:
        ValueError: no adapter to draw, or alpha not above 0.
    """
    if num_adapters < 1 or not alpha > 0:
        raise ValueError(f"num_adapters is {num_adapters} (1 or more), alpha is {alpha} (above 0)")
    index = (rng.power(alpha, num_requests) * num_adapters).astype(np.int64)
    return np.minimum(index, num_adapters - 1)


def uniform_indices(num_adapters: int, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw adapter indices uniformly; shape (num_requests,).

    Raises:
        ValueError: no adapter to draw.
    """
    if num_adapters < 1:
        raise ValueError(f"num_adapters is {num_adapters}; it must be 1 or more")
    return rng.integers(0, num_adapters, num_requests, dtype=np.int64)


def assign(
    workload: Sequence[WorkloadRequest], adapters: Sequence[str], indices: npt.NDArray[np.int64]
) -> Sequence[WorkloadRequest]:
    """Give the workload's i-th request the adapter `adapters[indices[i]]`."""
    if isinstance(workload, WorkloadColumns):
        return workload.with_adapters(adapters, indices)
    return [
        replace(request, adapter_id=adapters[index]) for request, index in zip(workload, indices.tolist(), strict=True)
    ]


LEAST_SECONDS = 0.001
"""Least period of repeated changes."""
MOST_ADAPTERS = 1_000_000
"""In a cluster, so also the largest shift of ranks."""
_ROUNDS = 32
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Diurnal:
    """Days that begin at different times for each adapter.

    Attributes:
        period_seconds: T, `LEAST_SECONDS` or more.
        amplitude: A, 0 to 1.
    """

    period_seconds: float
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        if not (self.period_seconds >= LEAST_SECONDS and 0 <= self.amplitude <= 1):
            raise ValueError(
                f"period is {self.period_seconds:g} ({LEAST_SECONDS:g} or more), amplitude {self.amplitude:g} (0 to 1)"
            )


@dataclass(frozen=True, slots=True)
class Flash:
    """A flash crowd.

    Attributes:
        at_seconds: when it begins.
        for_seconds: its duration.
        share: of all requests in that time, 0 to 1.
        adapter: its index; None: the least popular.
    """

    at_seconds: float
    for_seconds: float
    share: float = 0.5
    adapter: int | None = None

    def __post_init__(self) -> None:
        if not (self.at_seconds >= 0 and self.for_seconds > 0 and 0 <= self.share <= 1):
            raise ValueError(
                f"at is {self.at_seconds:g} (0 or more), for {self.for_seconds:g} (above 0), share {self.share:g}"
                " (0 to 1)"
            )


@dataclass(frozen=True, slots=True)
class Shift:
    """Ranks that move at intervals.

    Attributes:
        every_seconds: `LEAST_SECONDS` or more.
        by: ranks, up to `MOST_ADAPTERS` either way.
    """

    every_seconds: float
    by: int = 1

    def __post_init__(self) -> None:
        if not (self.every_seconds >= LEAST_SECONDS and abs(self.by) <= MOST_ADAPTERS):
            raise ValueError(
                f"every is {self.every_seconds:g} ({LEAST_SECONDS:g} or more), by {self.by:g} (-{MOST_ADAPTERS:,} to"
                f" {MOST_ADAPTERS:,})"
            )


Drift = Diurnal | Flash | Shift


def drifting_indices(
    drift: Drift,
    num_adapters: int,
    exponent: float,
    at_seconds: npt.NDArray[np.float64],
    rng: np.random.Generator,
) -> Indices:
    """Draw an adapter index for each time; shape as `at_seconds`.

    Raises:
        ValueError: no adapter to draw, a negative exponent, or a flash crowd's adapter out of range.
    """
    count = len(at_seconds)
    match drift:
        case Diurnal():
            return _diurnal(drift, num_adapters, exponent, at_seconds, rng)
        case Flash():
            crowded = num_adapters - 1 if drift.adapter is None else drift.adapter
            if not 0 <= crowded < num_adapters:
                raise ValueError(
                    f"the flash crowd's adapter is {crowded}; with {num_adapters} adapters it must be 0 to"
                    f" {num_adapters - 1}"
                )
            usual = zipf_indices(num_adapters, count, exponent, rng)
            lasts = (at_seconds >= drift.at_seconds) & (at_seconds < drift.at_seconds + drift.for_seconds)
            return np.where(lasts & (rng.random(count) < drift.share), crowded, usual)
        case Shift():
            usual = zipf_indices(num_adapters, count, exponent, rng)
            moves = np.floor(at_seconds / drift.every_seconds).astype(np.int64)
            return (usual + drift.by * moves) % num_adapters


def _diurnal(
    drift: Diurnal, num_adapters: int, exponent: float, at_seconds: npt.NDArray[np.float64], rng: np.random.Generator
) -> Indices:
    """Draw by rejection: a candidate by Zipf is kept with probability (1 + A sin) / (1 + A), others are drawn again.

    When all popular adapters are at their low that may take long; what is left after some rounds is drawn directly.
    """
    found = np.zeros(len(at_seconds), np.int64)
    open_rows = np.arange(len(at_seconds))
    for _ in range(_ROUNDS):
        candidates = zipf_indices(num_adapters, len(open_rows), exponent, rng)
        weight = _day(drift, num_adapters, at_seconds[open_rows], candidates)
        kept = rng.random(len(open_rows)) * (1 + drift.amplitude) < weight
        found[open_rows[kept]] = candidates[kept]
        open_rows = open_rows[~kept]
    ranks = np.arange(num_adapters)
    for row in open_rows.tolist():
        weights = (ranks + 1.0) ** -exponent * _day(drift, num_adapters, at_seconds[row : row + 1], ranks)
        sums = np.cumsum(weights)
        found[row] = min(int(np.searchsorted(sums, rng.random() * sums[-1], side="right")), num_adapters - 1)
    return found


def _day(
    drift: Diurnal, num_adapters: int, at_seconds: npt.NDArray[np.float64], indices: Indices
) -> npt.NDArray[np.float64]:
    return 1 + drift.amplitude * np.sin(2 * math.pi * (at_seconds / drift.period_seconds + indices / num_adapters))
