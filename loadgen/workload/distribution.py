"""Summary of a sample: its size, mean and linearly interpolated percentiles.

A sample may be stored as arithmetic progressions, and is summarised without expanding it, exactly. A simulated worker's
decode steps get longer by a constant from one to the next, and every sequence of the batch has the same gap. So gaps
between tokens come as rows of four integers: the first value, the increment, the number of values, and the number of
sequences with each. A million requests have some five million rows, and a hundred million steps.

The number of values of a row below a limit is one division. A percentile lies between two cuts chosen from a sample of
the values: counting below the cuts finds the interval, and only its contents are examined again, until they are few
enough to expand and sort (Floyd and Rivest, "Expected time bounds for selection", 1975). The cuts affect the cost and
never the result. Rows are read in chunks, some ten times each, so they may be in a file.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, sqrt

import numpy as np
import numpy.typing as npt

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


Rows = npt.NDArray[np.int64]
"""Shape (n, 4): first value, increment (below 0: decreasing), number of values, multiplicity of each.

Numbers of values and multiplicities are at least 1. The last value minus the first is below 2**62, and so is the sum of
a row's values, each taken once. All values of all rows, repeats included, are fewer than 2**63.
"""
Chunks = Callable[[], Iterator[Rows]]
"""Return all rows, in chunks, on each call."""

MOST_SPELT_OUT = 250_000
"""Values that may be expanded; 10 MB."""
MOST_ROWS = 250_000
"""Rows kept between two passes; 8 MB."""
_SAMPLE = 32_768
_DEVIATIONS = 4
"""Distance of a cut from a percentile's place in the sample, in standard deviations."""
_HALF = 31
"""Bits of the lower half of a sum."""


def describe(chunks: Chunks, convert: Callable[[float], float]) -> Distribution:
    """Summarise the values of all rows, as `distribution` does those of a sample.

    Args:
        chunks: the rows.
        convert: to the unit of the figures; must not be decreasing.
    """
    chunks = _growing(chunks)
    size, _, _, _, total = _measure(chunks)
    if not size:
        return Distribution()
    places = [share * (size - 1) for share in PERCENTILES]
    ranks = sorted({min(floor(place) + up, size - 1) for place in places for up in (0, 1)})
    at = {rank: convert(value) for rank, value in zip(ranks, _select(chunks, ranks), strict=True)}
    percentiles: list[float] = []
    for place in places:
        low, high = at[floor(place)], at[min(floor(place) + 1, size - 1)]
        percentiles.append(low + (high - low) * (place - floor(place)))
    return Distribution(size, convert(total / size), *percentiles)


def spelt_out(rows: Rows) -> tuple[Rows, Rows]:
    """Return every value and its multiplicity; two arrays of shape (values,)."""
    first, step, num, times = rows.T
    index = np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num)
    return np.repeat(first, num) + index * np.repeat(step, num), np.repeat(times, num)


def _growing(chunks: Chunks) -> Chunks:
    """Reverse rows whose values decrease."""

    def turned() -> Iterator[Rows]:
        for rows in chunks():
            falls = rows[:, 1] < 0
            if falls.any():
                last = rows[:, 0] + rows[:, 1] * (rows[:, 2] - 1)
                first = np.where(falls, last, rows[:, 0])
                yield np.column_stack((first, np.abs(rows[:, 1]), rows[:, 2:]))
            else:
                yield rows

    return turned


def _measure(chunks: Chunks) -> tuple[int, int, int, int, int]:
    """Return the sample's size, the number of values without repeats, the least and the greatest of them, the sum."""
    size = num_values = total = 0
    least, greatest = 2**63 - 1, -(2**63)
    for rows in chunks():
        first, step, num, times = rows.T
        size += int((num * times).sum())
        num_values += int(num.sum())
        least = min(least, int(first.min(initial=least)))
        greatest = max(greatest, int((first + step * (num - 1)).max(initial=greatest)))
        sums = num * first + step * (num * (num - 1) // 2)
        # In two halves: the total exceeds 64 bits.
        total += int(((sums >> _HALF) * times).sum()) << _HALF
        total += int(((sums & ((1 << _HALF) - 1)) * times).sum())
    return size, num_values, least, greatest, total


def _select(chunks: Chunks, ranks: Sequence[int]) -> list[int]:
    """Return the values with these ranks, which count from 0 and are ascending."""
    size, num_values, least, greatest, _ = _measure(chunks)
    if least == greatest:
        return [least] * len(ranks)
    if num_values <= MOST_SPELT_OUT:
        values, times = spelt_out(np.concatenate(list(chunks())))
        order = np.argsort(values, kind="stable")
        upto = np.cumsum(times[order])
        found: list[int] = values[order][np.searchsorted(upto, ranks, side="right")].tolist()
        return found
    cuts = [least, *_cuts(chunks, ranks, size, least, greatest), greatest + 1]
    before = [sum([_num_times_below(rows, cut) for rows in chunks()]) for cut in cuts]
    selected: list[int] = []
    for cut, cut_after, low, high in zip(cuts, cuts[1:], before, before[1:], strict=False):
        its_ranks = [rank - low for rank in ranks if low <= rank < high]
        if its_ranks:
            selected += _select(_between(chunks, cut, cut_after), its_ranks)
    return selected


def _cuts(chunks: Chunks, ranks: Sequence[int], size: int, least: int, greatest: int) -> list[int]:
    """Return ascending limits around each of the ranks, as close as a sample can place them.

    Every second one halves the range, so that an unlucky sample costs only time.
    """
    sample = np.sort(_sampled(chunks, size))
    cuts = {(least + greatest) // 2 + 1}
    for rank in ranks:
        share = (rank + 0.5) / size
        margin = _DEVIATIONS * sqrt(len(sample) * share * (1 - share)) + 1
        low, high = floor(share * len(sample) - margin), ceil(share * len(sample) + margin)
        if low >= 0:
            cuts.add(int(sample[low]))
        if high < len(sample):
            cuts.add(int(sample[high]) + 1)
    return sorted(cut for cut in cuts if least < cut <= greatest)


def _sampled(chunks: Chunks, size: int) -> Rows:
    """Return values at even distances, in the order of the rows."""
    places = (np.arange(_SAMPLE) * 2 + 1) * size // (2 * _SAMPLE)
    found: list[Rows] = []
    begin = 0
    for rows in chunks():
        first, step, num, times = rows.T
        ends = begin + np.cumsum(num * times)
        end = int(ends[-1]) if len(ends) else begin
        here = places[np.searchsorted(places, begin) : np.searchsorted(places, end)]
        row = np.searchsorted(ends, here, side="right")
        into = here - (ends - num * times)[row]
        found.append(first[row] + into // times[row] * step[row])
        begin = end
    return np.concatenate(found)


def _num_below(rows: Rows, limit: int) -> Rows:
    """Return the number of values below a limit for each row; shape (n,)."""
    first, step, num, _ = rows.T
    room = limit - first
    # Equal values are all below the limit or none; a step of 1 in their place gives the sign.
    below = np.where(step > 0, -(-room // np.maximum(step, 1)), np.where(room > 0, num, 0))
    return below.clip(0, num)


def _num_times_below(rows: Rows, limit: int) -> int:
    return int((_num_below(rows, limit) * rows[:, 3]).sum())


def _between(chunks: Chunks, low: int, high: int) -> Chunks:
    """Return the values from `low` to below `high`; in memory unless they are too many."""

    def cut(rows: Rows) -> Rows:
        begin, end = _num_below(rows, low), _num_below(rows, high)
        parts = np.column_stack((rows[:, 0] + begin * rows[:, 1], rows[:, 1], end - begin, rows[:, 3]))
        return parts[end > begin]

    kept: list[Rows] = []
    for rows in chunks():
        kept.append(cut(rows))
        if sum(map(len, kept)) > MOST_ROWS:
            return lambda: (cut(rows) for rows in chunks())
    return lambda: iter(kept)
