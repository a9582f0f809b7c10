"""Whether two runs differ by more than chance: a 95 % interval for each metric of their steady parts.

Ramp-up and drain are left out (`spread.py`); the random variation of a figure over the rest is estimated from the run
itself (`spread.py`).

Runs with the same requests, by position in the workload, are compared in pairs, even if they were sent at other times,
as in closed loops: the workload's effect on both cancels. Tokens/s are paired by parts in which both runs sent the same
number of requests, which have the same work. Other runs are independent, and their variances add up.

A metric needs 100 requests in each run, a quantile ten beyond it, and a steady part of eight mean E2E times; otherwise
there is no interval. If only the queue makes E2E times long, as in an overloaded cluster, tokens/s and TPOT have one.
Without a steady part of sufficient length, figures are those of the whole runs. The share of failed requests always is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lorrery.view.reports.figures import quantiles
from lorrery.view.reports.requests import Requests
from lorrery.view.reports.spread import Steady, difference, drifts, estimate, estimate_mean, steadily_served, steady
from lorrery.view.reports.timeline import tokens_between

__all__ = ["Comparison", "Difference", "Short", "compare"]

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

FEWEST = 100
_FEWEST_COSINES, _MOST_COSINES = 3, 12
_E2E_PER_COSINE = 6.0
"""Half a period of the fastest cosine in mean E2E times, unless that leaves fewer than three cosines."""
_FEWEST_OF_A_TREND = 4
"""Cosines needed to detect a trend."""
_NUM_PARTS = 240
"""Parts of the steady time, for throughput."""
_SAME_TIME = 1e-5
"""Largest difference in seconds between simultaneous sends: files have microseconds."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A metric in two runs; NaN if unknown.

    Attributes:
        name: of the metric.
        unit: `s`, `%` or `tokens/s`.
        less_is_better: direction of improvement.
        low: of the interval of `other - base`.
        doubt: why the interval means less than it seems, or why there is none; empty if neither.
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
        """`equal`, `within noise`, `drifts`, `lower`, `higher`, or empty without an interval."""
        if self.low == self.high == 0 and self.base == self.other:
            return "equal"
        if np.isnan(self.low):
            return ""
        if self.low <= 0 <= self.high:
            return "drifts" if self.doubt == "drifts" else "within noise"
        return "lower" if self.high < 0 else "higher"


@dataclass(frozen=True, slots=True)
class Short:
    """Why runs are too short, and what can be compared nevertheless.

    Attributes:
        which: 0 or 1, the run that is shorter relative to its need.
        sends_seconds: from its first send to its last.
        e2e: its mean E2E time, seconds.
        queue_share: share of that spent waiting; 0 if unknown.
        num_pairs: equal requests that completed in both; 0: the runs had different requests.
        num_slower: of these, with a longer E2E time in the other run.
        num_faster: of these, with a shorter one.
    """

    which: int
    sends_seconds: float
    e2e: float
    queue_share: float
    num_pairs: int
    num_slower: int
    num_faster: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of two runs.

    Attributes:
        parts: steady part of each; None: one of them has none of sufficient length.
        served: without `parts`, the parts used for tokens/s and TPOT; None: neither are sufficient.
        short: why there are no `parts`; None: there are, or a run completed nothing.
        same_requests: whether the runs had the same requests.
        same_times: whether they also sent them at the same times.
    """

    differences: list[Difference]
    parts: tuple[Steady, Steady] | None
    served: tuple[Steady, Steady] | None
    short: Short | None
    same_requests: bool
    same_times: bool


@dataclass(frozen=True, slots=True)
class _Series:
    """A value per request, and the statistics of it.

    Attributes:
        statistics: by name the level of a quantile, or None for the mean.
        is_of_service: whether it is independent of the time requests wait.
    """

    name: str
    unit: str
    values: Callable[[Requests], Floats]
    statistics: Mapping[str, float | None]
    is_of_service: bool = False


_LATENCIES = (
    _Series("TTFT", "s", lambda run: run.ttft, {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}),
    _Series("TPOT", "s", lambda run: run.tpot, {"p50": 0.5, "p99": 0.99}, is_of_service=True),
    _Series("E2E", "s", lambda run: run.e2e, {"p50": 0.5, "p99": 0.99}),
    _Series("queue", "s", lambda run: np.where(run.completed, run["queue_seconds"], np.nan), {"mean": None}),
)
_FAILED = _Series("failed", "%", lambda run: np.where(run.failed, 100.0, 0.0), {"requests": None})


@dataclass(frozen=True, slots=True)
class _Run:
    """A run, and the requests of it that count.

    Attributes:
        rows: of the requests that count, in order of their sends, or of the other run's.
        cosines: for its spread; 0: the run is too short.
    """

    requests: Requests
    rows: npt.NDArray[np.int64]
    cosines: int


def compare(base: Requests, other: Requests) -> Comparison:
    """Compare each metric of two runs."""
    place = _same_requests(base, other)
    same_times = place is not None and _same_times(base, other, place)
    parts = _long_enough(steady(base), steady(other))
    served = parts or _long_enough(steadily_served(base), steadily_served(other))
    found = [_whole_throughput(base, other) if served is None else _throughput(base, other, served, place is not None)]
    for series in _LATENCIES:
        counted = _runs(base, other, place, served if series.is_of_service else parts)
        found += _compare(series, *counted, paired=place is not None)
    cosines = 0 if parts is None else min(map(_num_cosines, parts))
    whole = (replace(one, cosines=cosines) for one in _runs(base, other, place, None))
    found += _compare(_FAILED, *whole, paired=place is not None)
    kept = [one for one in found if not (np.isnan(one.base) and np.isnan(one.other))]
    kept = [one for one in kept if not (one.unit == "%" and one.base == one.other == 0)]
    short = None if parts else _short(base, other, place)
    return Comparison(kept, parts, None if parts else served, short, place is not None, same_times)


def _short(base: Requests, other: Requests, place: npt.NDArray[np.int64] | None) -> Short | None:
    lives = [np.nan if one is None else one.lives for one in (steady(base), steady(other))]
    if np.isnan(lives).any():
        return None
    which = int(np.argmin(lives))
    run = (base, other)[which]
    sent, e2e, queue = run["intended_seconds"], float(np.nanmean(run.e2e)), run["queue_seconds"][run.completed]
    if e2e <= 0:
        return None
    share = float(np.nanmean(queue)) / e2e if np.isfinite(queue).any() else 0.0
    changes = np.zeros(0) if place is None else other.e2e[place] - base.e2e
    changes = changes[np.isfinite(changes)]
    slower, faster = int((changes > _SAME_TIME).sum()), int((changes < -_SAME_TIME).sum())
    return Short(which, float(np.nanmax(sent) - np.nanmin(sent)), e2e, share, len(changes), slower, faster)


def _long_enough(base: Steady | None, other: Steady | None) -> tuple[Steady, Steady] | None:
    if base is None or other is None or not (base.is_long_enough and other.is_long_enough):
        return None
    return base, other


def _same_requests(base: Requests, other: Requests) -> npt.NDArray[np.int64] | None:
    """Return the row of each of the first run's requests in the second; None: the runs had different requests.

    Equal requests have the same index, prompt length, adapter and, if both completed, output length.
    """
    if len(base) != len(other):
        return None
    place = np.arange(len(base))
    if base.has("index") and other.has("index"):
        place = np.empty(len(base), np.int64)
        place[np.argsort(base["index"], kind="stable")] = np.argsort(other["index"], kind="stable")
        if not np.array_equal(base["index"], other["index"][place]):
            return None
    completed = base.completed & other.completed[place]
    codes = {name: code for code, name in enumerate(base.names["adapter_id"])}
    adapters = np.array([codes.get(name, -1) for name in other.names["adapter_id"]], np.int64)
    are_same = (
        np.array_equal(base["prompt_tokens"], other["prompt_tokens"][place])
        and np.array_equal(base["output_tokens"][completed], other["output_tokens"][place][completed])
        and np.array_equal(base.codes["adapter_id"], adapters[other.codes["adapter_id"][place]])
    )
    return place if are_same else None


def _same_times(base: Requests, other: Requests, place: npt.NDArray[np.int64]) -> bool:
    times = base["intended_seconds"], other["intended_seconds"][place]
    return bool(np.allclose(*times, rtol=0, atol=_SAME_TIME, equal_nan=True))


def _num_cosines(part: Steady) -> int:
    return min(_MOST_COSINES, max(_FEWEST_COSINES, int(part.lives / _E2E_PER_COSINE)))


def _runs(
    base: Requests, other: Requests, place: npt.NDArray[np.int64] | None, parts: tuple[Steady, Steady] | None
) -> tuple[_Run, _Run]:
    """Select what counts: the steady part of each run, in order of time; for pairs the intersection, by base."""
    if parts is None:
        rows = [np.arange(len(base)), np.arange(len(other)) if place is None else place]
        return _Run(base, rows[0], 0), _Run(other, rows[1], 0)
    cosines = [_num_cosines(one) for one in parts]
    if place is None:
        rows = [_in_order(np.flatnonzero(one.counts), one) for one in parts]
    else:
        common = _in_order(np.flatnonzero(parts[0].counts & parts[1].counts[place]), parts[0])
        rows, cosines = [common, place[common]], [min(cosines)] * 2
    return _Run(base, rows[0], cosines[0]), _Run(other, rows[1], cosines[1])


def _in_order(rows: npt.NDArray[np.int64], part: Steady) -> npt.NDArray[np.int64]:
    return rows[np.argsort(part.at[rows], kind="stable")]


def _compare(series: _Series, base: _Run, other: _Run, *, paired: bool) -> list[Difference]:
    each = [series.values(run.requests)[run.rows] for run in (base, other)]
    known = [one[np.isfinite(one)] for one in each]
    is_equal = paired and np.array_equal(each[0], each[1], equal_nan=True)
    found = []
    for name, level in series.statistics.items():
        shown = [_statistic(values, level) for values in known]
        result = Difference(f"{series.name} {name}", series.unit, True, shown[0], shown[1])
        fewest = FEWEST if level is None else max(FEWEST, round(10 / (1 - level)))
        if min(map(len, known)) < fewest:
            found.append(replace(result, doubt=f"fewer than {fewest:,} requests"))
        elif is_equal:
            found.append(replace(result, low=0.0, high=0.0))
        elif min(base.cosines, other.cosines) == 0:
            found.append(replace(result, doubt="too short"))
        else:
            made = [estimate(values, level, run.cosines) for values, run in zip(each, (base, other), strict=True)]
            low, high = difference(*made, paired=paired)
            found.append(replace(result, low=low, high=high, doubt=_doubt(each, (base.cosines, other.cosines))))
    return found


def _doubt(each: list[Floats], cosines: tuple[int, int]) -> str:
    has_trend = [drifts(one, max(_FEWEST_OF_A_TREND, count)) for one, count in zip(each, cosines, strict=True)]
    return "drifts" if any(has_trend) else ""


def _throughput(base: Requests, other: Requests, parts: tuple[Steady, Steady], paired: bool) -> Difference:
    """Compare output tokens per second, by parts of the steady time: equal ones, or in pairs by numbers of sends."""
    edges = (
        _paired_edges(base, other, parts)
        if paired
        else [np.linspace(one.first, one.full_until, _NUM_PARTS + 1) for one in parts]
    )
    cosines = [_num_cosines(one) for one in parts]
    if paired:
        cosines = [min(cosines)] * 2
    rates, each = [], []
    for run, at in zip((base, other), edges, strict=True):
        tokens, seconds = tokens_between(at, run, ~run.failed), np.diff(at)
        rates.append(float(tokens.sum() / seconds.sum()))
        each.append((tokens - rates[-1] * seconds) / seconds.mean())
    result = Difference("output tokens/s", "tokens/s", False, rates[0], rates[1])
    if min(int(run.completed.sum()) for run in (base, other)) < FEWEST:
        return replace(result, doubt=f"fewer than {FEWEST:,} requests")
    if paired and rates[0] == rates[1] and np.array_equal(each[0], each[1]):
        return replace(result, low=0.0, high=0.0)
    widths = [part.life * (len(at) - 1) / float(at[-1] - at[0]) for part, at in zip(parts, edges, strict=True)]
    if paired:
        widths = [max(widths)] * 2
    each = [_smoothed(one, width) for one, width in zip(each, widths, strict=True)]
    doubt = _doubt(each, (cosines[0], cosines[1]))
    made = [estimate_mean(*one) for one in zip(rates, each, cosines, strict=True)]
    low, high = difference(*made, paired=paired)
    return replace(result, low=low, high=high, doubt=doubt)


def _paired_edges(base: Requests, other: Requests, parts: tuple[Steady, Steady]) -> list[Floats]:
    """Divide the time in which both runs are steady into parts in which both sent the same number of requests."""
    sends = [np.sort(run["intended_seconds"]) for run in (base, other)]
    begin = max(int(np.searchsorted(at, one.first)) for at, one in zip(sends, parts, strict=True))
    chosen = np.unique(np.linspace(begin, len(sends[0]) - 1, _NUM_PARTS + 1).round().astype(np.int64))
    return [at[chosen] for at in sends]


def _smoothed(rates: Floats, width: float) -> Floats:
    """Average over a bell two E2E times wide: requests that end together make waves, which average out over a run.

    The cut of the last bell would look like a slow fluctuation, so only whole bells count. The result is scaled, so
    that its mean has the variance of the longer series.

    Args:
        rates: shape (n,).
        width: of an E2E time, in parts.
    """
    half = max(1, round(width))
    bell = np.hanning(2 * half + 1)[1:-1]
    found: Floats = np.convolve(rates - rates.mean(), bell / bell.sum(), "valid")
    found -= found.mean()
    found *= (len(found) / len(rates)) ** 0.5
    return found


def _whole_throughput(base: Requests, other: Requests) -> Difference:
    shown = [_tokens_per_second(run) for run in (base, other)]
    result = Difference("output tokens/s", "tokens/s", False, shown[0], shown[1])
    if min(int(run.completed.sum()) for run in (base, other)) < FEWEST:
        return replace(result, doubt=f"fewer than {FEWEST:,} requests")
    return replace(result, doubt="too short")


def _tokens_per_second(run: Requests) -> float:
    return float(run["output_tokens"][run.completed].sum()) / run.duration if run.duration > 0 else float("nan")


def _statistic(values: Floats, level: float | None) -> float:
    if not len(values):
        return float("nan")
    return float(values.mean() if level is None else quantiles(values, level)[0])
