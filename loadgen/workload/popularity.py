"""Draws the adapter of each request. No public trace has adapters, so the result is synthetic; reports label it so.

Two laws are in use and easily confused. Both give the most popular adapter index 0 where they are skewed:

* Zipf (`zipf_indices`): P(i) proportional to (i + 1) ** -exponent. exponent 0 is uniform, about 1 is usual, larger is
  more skewed. A law of ranks, discrete from the start.
* S-LoRA's `power(alpha)` (`power_indices`): i = int(u * N) with u of density alpha * u ** (alpha - 1), that is
  P(index < k) = (k / N) ** alpha. alpha 1 is uniform, SMALLER is more skewed to index 0, above 1 is skewed to the LAST.

Chen et al., "Punica", MLSys 2024, and S-LoRA (Sheng et al., MLSys 2024) evaluate with skews of these kinds.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.columns import WorkloadColumns
from lorrery.loadgen.workload.request import WorkloadRequest

__all__ = ["assign", "power_indices", "uniform_indices", "zipf_indices"]


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
