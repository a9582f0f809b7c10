"""Whether two runs differ by more than chance: a block bootstrap over requests, in order of their intended sends.

Neighbouring requests share a queue and a batch, so their latencies are alike, and a bootstrap of single requests would
be far too sure. Blocks of consecutive requests are drawn instead (Kuensch 1989, without overlap). Their length doubles
until the means of neighbouring blocks are no longer correlated (lag-1 correlation below 0.2: Law and Carson's batch
means, 1979), with 20 blocks at least. If they still are with 20, the run drifts, as with a queue that only grows; the
interval is then too narrow, and the page says so.

Runs of the same workload (same requests at the same times) are compared in pairs: the same blocks are drawn of both, so
that what the workload does to both cancels. Other runs are drawn independently. The interval holds the middle 95 % of
1,000 draws of the difference; draws are seeded, so a page comes out the same each time. Quantiles of a draw come from
counts in 768 bins per run, at its own quantiles, denser in the tail: below 0.2 % of rank.

A metric needs 100 requests in each run, and a quantile ten beyond it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
_RANKS = np.concatenate([np.linspace(0, 0.9, 512, endpoint=False), np.linspace(0.9, 1, 257)])
_NUM_TIMES = 200
"""Parts of a run's duration, for its throughput."""


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
class _Metric:
    name: str
    unit: str
    less_is_better: bool
    values: Callable[[Requests], Floats]
    level: float | None
    """Of a quantile; None: the mean."""


def _failed(requests: Requests) -> Floats:
    return np.where(requests.failed, 100.0, 0.0)


def _metrics(name: str, values: Callable[[Requests], Floats], levels: Mapping[str, float | None]) -> list[_Metric]:
    return [_Metric(f"{name} {level}", "s", True, values, rank) for level, rank in levels.items()]


_METRICS = (
    *_metrics("TTFT", lambda run: run.ttft, {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}),
    *_metrics("TPOT", lambda run: run.tpot, {"p50": 0.5, "p99": 0.99}),
    *_metrics("E2E", lambda run: run.e2e, {"p50": 0.5, "p99": 0.99}),
    *_metrics("queue", lambda run: np.where(run.completed, run["queue_seconds"], np.nan), {"mean": None}),
    _Metric("failed requests", "%", True, _failed, None),
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
    found = [_compare(metric, base, other, paired=paired) for metric in _METRICS]
    throughput = _throughput(base, other, paired=paired)
    kept = [one for one in (throughput, *found) if not (np.isnan(one.base) and np.isnan(one.other))]
    return [one for one in kept if not (one.unit == "%" and one.base == one.other == 0)]


def _compare(metric: _Metric, base: Requests, other: Requests, *, paired: bool) -> Difference:
    series = metric.values(base), metric.values(other)
    values = [one[np.isfinite(one)] for one in series]
    shown = [_statistic(one, metric.level) for one in values]
    result = Difference(metric.name, metric.unit, metric.less_is_better, shown[0], shown[1])
    fewest = FEWEST if metric.level is None else max(FEWEST, round(10 / (1 - metric.level)))
    if min(map(len, values)) < fewest:
        return _with(result, doubt=f"fewer than {fewest:,} requests")
    rng = np.random.default_rng(1)
    if paired:
        both = np.isfinite(series[0]) & np.isfinite(series[1])
        if metric.unit != "%" and np.array_equal(series[0][both], series[1][both]) and len(values[0]) == len(values[1]):
            return _with(result, low=0.0, high=0.0)
        trend = np.where(both, series[1] - series[0], np.nan)
        blocks, drifts = _num_blocks(trend)
        draws = _draw(rng, blocks)
        drawn = [_drawn(one, blocks, draws, metric.level) for one in series]
    else:
        drawn, drifting = [], []
        for one in series:
            blocks, drifts = _num_blocks(one)
            drawn.append(_drawn(one, blocks, _draw(rng, blocks), metric.level))
            drifting.append(drifts)
        drifts = any(drifting)
    low, high = quantiles(drawn[1] - drawn[0], 0.025, 0.975)
    return _with(result, low=low, high=high, doubt="drifts" if drifts else "")


def _throughput(base: Requests, other: Requests, *, paired: bool) -> Difference:
    """Compare output tokens per second, by equal parts of each run's duration."""
    name, unit = "output tokens/s", "tokens/s"
    shown, series = [], []
    for run in (base, other):
        done = run.completed
        tokens, ends = run["output_tokens"][done], run["last_token_seconds"][done]
        shown.append(float(tokens.sum()) / run.duration if run.duration > 0 else float("nan"))
        edges = np.linspace(run.end - run.duration, run.end, _NUM_TIMES + 1)
        per_bin = np.histogram(ends, edges, weights=tokens)[0]
        series.append(per_bin * _NUM_TIMES / run.duration if run.duration > 0 else per_bin)
    result = Difference(name, unit, False, shown[0], shown[1])
    if min(int(run.completed.sum()) for run in (base, other)) < FEWEST:
        return _with(result, doubt=f"fewer than {FEWEST:,} requests")
    rng = np.random.default_rng(1)
    together = paired and abs(base.duration - other.duration) <= 0.02 * base.duration
    if together:
        blocks, drifts = _num_blocks(series[1] - series[0])
        draws = _draw(rng, blocks)
        drawn = [_drawn(one, blocks, draws, None) for one in series]
    else:
        counted = [_num_blocks(one) for one in series]
        drawn = [
            _drawn(one, blocks, _draw(rng, blocks), None) for one, (blocks, _) in zip(series, counted, strict=True)
        ]
        drifts = any(one for _, one in counted)
    low, high = quantiles(drawn[1] - drawn[0], 0.025, 0.975)
    return _with(result, low=low, high=high, doubt="drifts" if drifts else "")


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


def _draw(rng: np.random.Generator, blocks: int) -> npt.NDArray[np.float32]:
    """Return how often each block is in each draw; shape (draws, blocks)."""
    return rng.multinomial(blocks, np.full(blocks, 1 / blocks), NUM_DRAWS).astype(np.float32)


def _drawn(series: Floats, blocks: int, draws: npt.NDArray[np.float32], level: float | None) -> Floats:
    """Compute the statistic of each draw; shape (draws,)."""
    known = np.isfinite(series)
    values, which = series[known], _block_of(len(series), blocks)[known]
    counts = np.bincount(which, minlength=blocks)
    if level is None:
        sums = np.bincount(which, weights=values, minlength=blocks)
        means: Floats = draws @ sums / np.maximum(draws @ counts, 1)
        return means
    edges = at_ranks(np.sort(values), _RANKS)
    edges = edges[np.concatenate(([True], np.diff(edges) > 0))]
    bins = np.searchsorted(edges, values, side="left")
    table = np.bincount(which * len(edges) + bins, minlength=blocks * len(edges)).reshape(blocks, len(edges))
    below = np.cumsum(draws @ table.astype(np.float32), axis=1, dtype=np.float64)
    target = level * below[:, -1:]
    at = (below < target).sum(axis=1).clip(max=len(edges) - 1)
    rows = np.arange(len(draws))
    under = np.where(at > 0, below[rows, np.maximum(at - 1, 0)], 0.0)
    inside = (target[:, 0] - under) / np.maximum(below[rows, at] - under, 1e-9)
    lower = edges[np.maximum(at - 1, 0)]
    found: Floats = lower + (edges[at] - lower) * inside.clip(0, 1)
    return found
