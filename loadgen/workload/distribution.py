"""Summary of a sample: its size, mean and linearly interpolated percentiles."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PERCENTILES", "Distribution", "distribution"]

PERCENTILES = (0.5, 0.9, 0.99)
"""Percentiles of every distribution, in order."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample's size, mean and percentiles, in the sample's unit; all 0 for an empty sample."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


def distribution(values: npt.NDArray[np.float64]) -> Distribution:
    """Summarise a sample; values: shape (n,). Takes 16 bytes a value."""
    size = len(values)
    if not size:
        return Distribution()
    in_order = np.sort(values)
    ranks = np.array(PERCENTILES) * (size - 1)
    low = in_order[np.floor(ranks).astype(np.int64)]
    high = in_order[(np.floor(ranks).astype(np.int64) + 1).clip(max=size - 1)]
    p50, p90, p99 = (low + (high - low) * (ranks - np.floor(ranks))).tolist()
    # Not a dot product: BLAS sums in as many parts as it has threads, which would change the last digit.
    return Distribution(size, float(in_order.sum()) / size, p50, p90, p99)
