"""Whether two runs differ by more than chance: a block bootstrap over requests, in order of their intended sends.

Neighbouring requests share a queue and a batch, so their latencies are alike, and a bootstrap of single requests would
be far too sure. Blocks of consecutive requests are drawn instead (Kuensch 1989, without overlap). Their length doubles
until the means of neighbouring blocks are no longer correlated (lag-1 correlation below 0.2: Law and Carson's batch
means, 1979), with 20 blocks at least. If they still are with 20, the run drifts, as with a queue that only grows; the
interval is then too narrow, and the page says so.

Runs of the same workload (same requests at the same times) are compared in pairs: the same blocks are drawn of both, so
that what the workload does to both cancels. Other runs are drawn independently. The interval holds the middle 95 % of
1,000 draws of the difference; draws are seeded, so a page comes out the same each time. Quantiles of a draw come from
counts in 512 bins per run, at its own quantiles, denser in the tail: 0.4 % of rank, 0.04 % above p90.

A metric needs 100 requests in each run, and a quantile ten beyond it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lorrery.reports.figures import at_ranks, quantiles
from lorrery.reports.requests import Requests

__all__ = ["Difference", "compare", "is_same_workload"]

Floats = npt.NDArray[np.float64]

NUM_DRAWS = 1000
FEWEST = 100
_FEWEST_BLOCKS, _MOST_BLOCKS = 20, 200
_CORRELATED = 0.2
_RANKS = np.concatenate([np.linspace(0, 0.9, 256, endpoint=False), np.linspace(0.9, 1, 257)])
_NUM_TIMES = 200
"""Parts of a run's duration, for its throughput."""
_SAME_DURATION = 0.02
"""Share by which the durations of runs may differ whose throughput is compared in pairs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A metric in two runs; NaN where it is not known.

    Attributes:
        name: of the metric.
        unit: `s`, `%` or `tokens/s`.
        less_is_better: what a difference means.
        low: of the interval of `other - base`.
        doubt: why the interval says less than it seems, or why there is none; empty if neither.
    """

    name: str
    unit: str
    less_is_better: bool
    base: float
    other: float
    low: float = float("nan")
    high: float = float("nan")
    doubt: str = ""

    @property
    def verdict(self) -> str:
        """`equal`, `within noise`, `lower`, `higher`, or empty where nothing can be said."""
        if self.low == self.high == 0 and self.base == self.other:
            return "equal"
        if np.isnan(self.low):
            return ""
        if self.low <= 0 <= self.high:
            return "within noise"
        return "lower" if self.high < 0 else "higher"


@dataclass(frozen=True, slots=True)
class _Series:
    """A value of each request, and what is computed of it: by name the level of a quantile, or None for the mean."""

    name: str
    unit: str
    values: Callable[[Requests], Floats]
    statistics: Mapping[str, float | None]


_SERIES = (
    _Series("TTFT", "s", lambda run: run.ttft, {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}),
    _Series("TPOT", "s", lambda run: run.tpot, {"p50": 0.5, "p99": 0.99}),
    _Series("E2E", "s", lambda run: run.e2e, {"p50": 0.5, "p99": 0.99}),
    _Series("queue", "s", lambda run: np.where(run.completed, run["queue_seconds"], np.nan), {"mean": None}),
    _Series("failed", "%", lambda run: np.where(run.failed, 100.0, 0.0), {"requests": None}),
)


def is_same_workload(base: Requests, other: Requests) -> bool:
    """Tell whether two runs had the same requests at the same intended times."""
    return (
        len(base) == len(other)
        and bool(np.array_equal(base["prompt_tokens"], other["prompt_tokens"]))
        and bool(np.allclose(base["intended_seconds"], other["intended_seconds"], rtol=0, atol=1e-5, equal_nan=True))
    )


def compare(base: Requests, other: Requests) -> list[Difference]:
    """Compare each metric of two runs."""
    paired = is_same_workload(base, other)
    found = [_throughput(base, other, paired=paired)]
    for series in _SERIES:
        found += _compare(series, base, other, paired=paired)
    kept = [one for one in found if not (np.isnan(one.base) and np.isnan(one.other))]
    return [one for one in kept if not (one.unit == "%" and one.base == one.other == 0)]


def _compare(series: _Series, base: Requests, other: Requests, *, paired: bool) -> list[Difference]:
    each = series.values(base), series.values(other)
    known = [one[np.isfinite(one)] for one in each]
    both = np.isfinite(each[0]) & np.isfinite(each[1]) if paired else np.empty(0, np.bool_)
    is_equal = paired and len(known[0]) == len(known[1]) and np.array_equal(each[0][both], each[1][both])
    drawn: tuple[_Draws, _Draws] | None = None
    found = []
    for name, level in series.statistics.items():
        shown = [_statistic(values, level) for values in known]
        result = Difference(f"{series.name} {name}", series.unit, True, shown[0], shown[1])
        fewest = FEWEST if level is None else max(FEWEST, round(10 / (1 - level)))
        if min(map(len, known)) < fewest:
            found.append(_with(result, doubt=f"fewer than {fewest:,} requests"))
        elif is_equal:
            found.append(_with(result, low=0.0, high=0.0))
        else:
            trend = np.where(both, each[1] - each[0], np.nan) if paired else None
            drawn = drawn or _draw_both(each, trend)
            found.append(_judged(result, drawn, level))
    return found


def _throughput(base: Requests, other: Requests, *, paired: bool) -> Difference:
    """Compare output tokens per second, by equal parts of each run's duration."""
    shown, series = [], []
    for run in (base, other):
        done = run.completed
        tokens, ends = run["output_tokens"][done], run["last_token_seconds"][done]
        edges = np.linspace(run.end - run.duration, run.end, _NUM_TIMES + 1)
        per_second = _NUM_TIMES / run.duration if run.duration > 0 else np.nan
        shown.append(float(tokens.sum()) / run.duration if run.duration > 0 else np.nan)
        series.append(np.histogram(ends, edges, weights=tokens)[0] * per_second)
    result = Difference("output tokens/s", "tokens/s", False, shown[0], shown[1])
    if min(int(run.completed.sum()) for run in (base, other)) < FEWEST or np.isnan(shown).any():
        return _with(result, doubt=f"fewer than {FEWEST:,} requests")
    as_long = abs(base.duration - other.duration) <= _SAME_DURATION * base.duration
    trend = series[1] - series[0] if paired and as_long else None
    return _judged(result, _draw_both((series[0], series[1]), trend), None)


def _judged(result: Difference, drawn: "tuple[_Draws, _Draws]", level: float | None) -> Difference:
    differences = drawn[1].statistic(level) - drawn[0].statistic(level)
    low, high = quantiles(differences, 0.025, 0.975)
    return _with(result, low=low, high=high, doubt="drifts" if drawn[0].drifts or drawn[1].drifts else "")


def _draw_both(series: tuple[Floats, Floats], trend: Floats | None) -> "tuple[_Draws, _Draws]":
    """Draw blocks of two series: the same ones, chosen by their differences' trend, or without one each by itself."""
    rng = np.random.default_rng(1)
    if trend is None:
        first, second = (_Draws(one, *_num_blocks(one), rng) for one in series)
        return first, second
    blocks, drifts = _num_blocks(trend)
    first = _Draws(series[0], blocks, drifts, rng)
    return first, _Draws(series[1], blocks, drifts, rng, first.draws)


class _Draws:
    """Draws of a series' blocks.

    Attributes:
        draws: shape (draws, blocks), how often each block is in each draw.
        drifts: whether even these blocks are like their neighbours.
    """

    def __init__(
        self,
        series: Floats,
        blocks: int,
        drifts: bool,
        rng: np.random.Generator,
        draws: npt.NDArray[np.float32] | None = None,
    ) -> None:
        known = np.isfinite(series)
        self._values, self._block, self._blocks = series[known], _block_of(len(series), blocks)[known], blocks
        self.drifts = drifts
        self.draws = (
            rng.multinomial(blocks, np.full(blocks, 1 / blocks), NUM_DRAWS).astype(np.float32)
            if draws is None
            else draws
        )

    def statistic(self, level: float | None) -> Floats:
        """Compute the mean, or a quantile, of each draw; shape (draws,)."""
        if level is None:
            counts = np.bincount(self._block, minlength=self._blocks)
            sums = np.bincount(self._block, weights=self._values, minlength=self._blocks)
            means: Floats = self.draws @ sums / np.maximum(self.draws @ counts, 1)
            return means
        edges, below = self._counted
        target = level * below[:, -1:]
        at = (below < target).sum(axis=1).clip(max=len(edges) - 1)
        rows = np.arange(len(below))
        under = np.where(at > 0, below[rows, np.maximum(at - 1, 0)], 0.0)
        inside = (target[:, 0] - under) / np.maximum(below[rows, at] - under, 1e-9)
        lower = edges[np.maximum(at - 1, 0)]
        found: Floats = lower + (edges[at] - lower) * inside.clip(0, 1)
        return found

    @cached_property
    def _counted(self) -> tuple[Floats, npt.NDArray[np.float32]]:
        """The bins' upper edges, and of each draw how many values are below each."""
        edges = at_ranks(np.sort(self._values), _RANKS)
        edges = edges[np.concatenate(([True], np.diff(edges) > 0))]
        bins = np.searchsorted(edges, self._values, side="left")
        table = np.bincount(self._block * len(edges) + bins, minlength=self._blocks * len(edges))
        each = table.reshape(self._blocks, len(edges)).astype(np.float32)
        return edges, np.cumsum(self.draws @ each, axis=1)


def _with(
    difference: Difference, *, low: float = float("nan"), high: float = float("nan"), doubt: str = ""
) -> Difference:
    one = difference
    return Difference(one.name, one.unit, one.less_is_better, one.base, one.other, low, high, doubt)


def _statistic(values: Floats, level: float | None) -> float:
    if not len(values):
        return float("nan")
    return float(values.mean() if level is None else quantiles(values, level)[0])


def _num_blocks(series: Floats) -> tuple[int, bool]:
    """Choose how many blocks a series is cut into; and whether even the longest are like their neighbours."""
    size = len(series)
    length = max(1, round(size ** (1 / 3)), -(-size // _MOST_BLOCKS))
    while size // length >= _FEWEST_BLOCKS:
        means = _block_means(series, size // length)
        if _lag_one(means[np.isfinite(means)]) < _CORRELATED:
            return size // length, False
        length *= 2
    means = _block_means(series, _FEWEST_BLOCKS)
    return _FEWEST_BLOCKS, _lag_one(means[np.isfinite(means)]) >= _CORRELATED


def _block_of(size: int, blocks: int) -> npt.NDArray[np.int64]:
    return np.arange(size) * blocks // max(size, 1)


def _block_means(series: Floats, blocks: int) -> Floats:
    known = np.isfinite(series)
    which = _block_of(len(series), blocks)[known]
    counts = np.bincount(which, minlength=blocks)
    with np.errstate(invalid="ignore"):
        return np.bincount(which, weights=series[known], minlength=blocks) / counts


def _lag_one(means: Floats) -> float:
    centred = means - means.mean() if len(means) else means
    spread = float((centred * centred).sum())
    return float((centred[:-1] * centred[1:]).sum()) / spread if spread > 0 else 0.0
