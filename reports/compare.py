"""Whether two runs differ by more than chance: a 95 % interval for each metric of their steady parts.

Ramp-up and drain are left out (`steady.py`); how far a figure of what is left would change by chance is estimated from
the run itself (`spread.py`).

Runs that had the same requests, by position in the workload, are compared in pairs, even if they sent them at other
times, as closed loops do: the influence values of each request are subtracted, so that what the workload does to both
cancels. Other runs are independent, and their variances add up. Tokens/s are paired where the sends had the same times,
in equal parts of the time that both runs were in a steady state.

A metric needs 100 requests in each run, a quantile ten beyond it, and a steady part of eight mean E2E times; else there
is no interval. Without a steady part that is long enough, the figures are those of the whole runs. The share of failed
requests always is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lorrery.reports.figures import quantiles
from lorrery.reports.requests import Requests
from lorrery.reports.spread import degrees_of_difference, drifts, influence, spread, student
from lorrery.reports.steady import LEAST_E2E, Steady, steady
from lorrery.reports.timeline import tokens_between

__all__ = ["Comparison", "Difference", "compare"]

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

FEWEST = 100
_FEWEST_COSINES, _MOST_COSINES = 4, 12
_E2E_PER_COSINE = 4.0
"""Half a period of the fastest cosine in mean E2E times, unless that leaves fewer than four cosines."""
_NUM_TIMES = 240
"""Parts of the steady time, for throughput."""
_SAME_TIME = 1e-5
"""Seconds by which sends at the same time differ at most: files have microseconds."""


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
class Comparison:
    """What two runs differ by.

    Attributes:
        parts: steady part of each; None: one of them has none that is long enough.
        same_requests: whether the runs had the same requests.
        same_times: and sent them at the same times.
    """

    differences: list[Difference]
    parts: tuple[Steady, Steady] | None
    same_requests: bool
    same_times: bool


@dataclass(frozen=True, slots=True)
class _Series:
    """A value of each request, and what is computed of it: by name the level of a quantile, or None for the mean."""

    name: str
    unit: str
    values: Callable[[Requests], Floats]
    statistics: Mapping[str, float | None]


_LATENCIES = (
    _Series("TTFT", "s", lambda run: run.ttft, {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}),
    _Series("TPOT", "s", lambda run: run.tpot, {"p50": 0.5, "p99": 0.99}),
    _Series("E2E", "s", lambda run: run.e2e, {"p50": 0.5, "p99": 0.99}),
    _Series("queue", "s", lambda run: np.where(run.completed, run["queue_seconds"], np.nan), {"mean": None}),
)
_FAILED = _Series("failed", "%", lambda run: np.where(run.failed, 100.0, 0.0), {"requests": None})


@dataclass(frozen=True, slots=True)
class _Run:
    """A run, with what of it counts.

    Attributes:
        rows: of the requests that count, in order of their sends, or of the other run's.
        cosines: for its spread; 0: it is too short to tell.
    """

    requests: Requests
    rows: npt.NDArray[np.int64]
    cosines: int


def compare(base: Requests, other: Requests) -> Comparison:
    """Compare each metric of two runs."""
    parts = steady(base), steady(other)
    place = _same_requests(base, other)
    same_times = place is not None and _same_times(base, other, place)
    whole = _runs(base, other, place, None, None)
    if parts[0] is None or parts[1] is None or min(one.lengths for one in parts if one) < LEAST_E2E:
        found, both, counted = [_whole_throughput(base, other)], None, whole
    else:
        both = parts[0], parts[1]
        found, counted = [_throughput(base, other, *both, paired=same_times)], _runs(base, other, place, *both)
    for series in _LATENCIES:
        found += _compare(series, *counted, paired=place is not None)
    cosines = 0 if both is None else min(_num_cosines(one) for one in both)
    found += _compare(_FAILED, *(replace(one, cosines=cosines) for one in whole), paired=place is not None)
    kept = [one for one in found if not (np.isnan(one.base) and np.isnan(one.other))]
    kept = [one for one in kept if not (one.unit == "%" and one.base == one.other == 0)]
    return Comparison(kept, both, place is not None, same_times)


def _same_requests(base: Requests, other: Requests) -> npt.NDArray[np.int64] | None:
    """Find the row of each of the first run's requests in the second one; None: they had not the same requests.

    The same have the same index, prompt length, adapter and, where both completed, output length.
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
    return min(_MOST_COSINES, max(_FEWEST_COSINES, int(part.lengths / _E2E_PER_COSINE)))


def _runs(
    base: Requests, other: Requests, place: npt.NDArray[np.int64] | None, first: Steady | None, second: Steady | None
) -> tuple[_Run, _Run]:
    """Choose what counts: the steady part of each run; in pairs what is in both."""
    which = [np.ones(len(run), np.bool_) if one is None else one.sent for run, one in ((base, first), (other, second))]
    cosines = [0 if one is None else _num_cosines(one) for one in (first, second)]
    if place is None:
        rows = [np.flatnonzero(one) for one in which]
    else:
        common = np.flatnonzero(which[0] & which[1][place])
        rows, cosines = [common, place[common]], [min(cosines)] * 2
    return _Run(base, rows[0], cosines[0]), _Run(other, rows[1], cosines[1])


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
            influences = [influence(one, level)[1] for one in each]
            judged = _judged(result, (influences[0], influences[1]), (base.cosines, other.cosines), paired=paired)
            found.append(replace(judged, doubt=_doubt(each, (base.cosines, other.cosines))))
    return found


def _doubt(each: list[Floats], cosines: tuple[int, int]) -> str:
    has_trend = [drifts(influence(one, None)[1], count) for one, count in zip(each, cosines, strict=True)]
    return "drifts" if any(has_trend) else ""


def _throughput(base: Requests, other: Requests, first: Steady, second: Steady, *, paired: bool) -> Difference:
    """Compare output tokens per second, by equal parts of the steady time."""
    spans = [(one.first, one.full_until) for one in (first, second)]
    cosines = _num_cosines(first), _num_cosines(second)
    if paired:
        spans = [(max(first.first, second.first), min(first.full_until, second.full_until))] * 2
        cosines = min(cosines), min(cosines)
    rates = []
    for run, (begin, end) in zip((base, other), spans, strict=True):
        edges = np.linspace(begin, end, _NUM_TIMES + 1)
        rates.append(tokens_between(edges, run, ~run.failed) / (edges[1] - edges[0]))
    result = Difference("output tokens/s", "tokens/s", False, float(rates[0].mean()), float(rates[1].mean()))
    if min(int(run.completed.sum()) for run in (base, other)) < FEWEST:
        return replace(result, doubt=f"fewer than {FEWEST:,} requests")
    if paired and np.array_equal(rates[0], rates[1]):
        return replace(result, low=0.0, high=0.0)
    widths = [one.e2e * _NUM_TIMES / (end - begin) for one, (begin, end) in zip((first, second), spans, strict=True)]
    if paired:
        widths = [max(widths)] * 2
    each = [_smoothed(rate, width) for rate, width in zip(rates, widths, strict=True)]
    doubt = "drifts" if any(drifts(one, count) for one, count in zip(each, cosines, strict=True)) else ""
    return replace(_judged(result, (each[0], each[1]), cosines, paired=paired), doubt=doubt)


def _smoothed(rates: Floats, width: float) -> Floats:
    """Average over a bell two E2E times wide: requests that end together make waves, which average out over a run.

    Waves end somewhere in the last bell, and its cut would look like a slow fluctuation: only whole bells count. What
    is left is scaled, so that its mean has the variance of the longer series.

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


def _judged(result: Difference, each: tuple[Floats, Floats], cosines: tuple[int, int], *, paired: bool) -> Difference:
    """Give a difference its interval, from the influence values of both runs."""
    if paired:
        together = spread(result.other - result.base, each[1] - each[0], min(cosines))
        variance, degrees = together.variance, together.degrees
    else:
        alone = spread(result.base, each[0], cosines[0]), spread(result.other, each[1], cosines[1])
        variance, degrees = alone[0].variance + alone[1].variance, degrees_of_difference(*alone)
    half = student(0.95, degrees) * variance**0.5
    change = result.other - result.base
    return replace(result, low=change - half, high=change + half)


def _statistic(values: Floats, level: float | None) -> float:
    if not len(values):
        return float("nan")
    return float(values.mean() if level is None else quantiles(values, level)[0])
