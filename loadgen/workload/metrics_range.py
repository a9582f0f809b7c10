"""A workload from what Prometheus scraped of vLLM: how many requests finished in each interval, and their lengths.

A file has one or several answers of `/api/v1/query_range` (a JSON list of them, or a line for each), of plain counters
(no `rate`, no `sum`), whose series differ in labels:

    vllm:request_success_total                                    finished requests; needed
    vllm:request_prompt_tokens_bucket, ..._sum                    lengths of prompts, by `le`
    vllm:request_generation_tokens_bucket, ..._sum                lengths of outputs
    vllm:prompt_tokens_total, vllm:generation_tokens_total        without the histograms: their means

Between two scrapes as many requests arrive as finished, at uniform times: a Poisson process given its count, whose
rate is constant in each interval. Requests arrive as much too late as they took, which bends no curve of a day. A
length is drawn from the histogram's increase in its interval, uniformly within its bucket, and from the whole range's
where the interval has none; the last bucket ends at twice its lower bound. Then all are scaled so that their mean over
the range is that of the tokens counted: buckets alone are wide. A counter that falls was reset, and begins at 0.

Prefixes that repeat, tenants and adapters are in no such series.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.columns import WorkloadColumns
from lorrery.loadgen.workload.recorded import MOST_ROWS
from lorrery.loadgen.workload.request import MOST_TOKENS, TraceError

Floats = npt.NDArray[np.float64]

_NO_BOUND: Final = math.inf
"""Of a series that is no bucket, as of a last bucket."""
TITLE: Final = "a range of vLLM's metrics"
_FINISHED: Final = "vllm:request_success_total"
_LENGTHS: Final = (
    ("vllm:request_prompt_tokens", "vllm:prompt_tokens_total"),
    ("vllm:request_generation_tokens", "vllm:generation_tokens_total"),
)


def is_range(entry: object) -> bool:
    """Return whether an entry is an answer of Prometheus to a query."""
    return isinstance(entry, Mapping) and isinstance(data := entry.get("data"), Mapping) and "resultType" in data


@dataclass(slots=True)
class _Series:
    """The increases of all series of one name.

    Attributes:
        increases: of each bucket's upper bound (`_NO_BOUND`: of a plain counter), by time of the later scrape.
    """

    increases: dict[float, dict[float, float]] = field(default_factory=dict)

    def add(self, bound: float, values: Iterable[tuple[float, float]]) -> None:
        of_bound = self.increases.setdefault(bound, {})
        before: float | None = None
        for at, value in values:
            if before is not None:
                of_bound[at] = of_bound.get(at, 0.0) + (value - before if value >= before else value)
            before = value

    def table(self, scrapes: list[float]) -> Floats:
        """Return the increases; shape (bounds in order, scrapes)."""
        return np.array([[self.increases[bound].get(at, 0.0) for at in scrapes] for bound in sorted(self.increases)])


def requests_of(
    entries: Iterable[tuple[str, Any]], rng: np.random.Generator, most: int | None = None
) -> tuple[WorkloadColumns, list[str]]:
    """Draw the requests of a range; return them, and remarks.

    Args:
        entries: place and value of each answer.
        rng: of times and lengths.
        most: requests to draw; None: all.

    Raises:
        TraceError: no such answer, or none of the needed series.
    """
    series: dict[str, _Series] = {}
    starts: list[float] = []
    for where, entry in entries:
        for name, bound, values in _read(where, entry):
            series.setdefault(name, _Series()).add(bound, values)
            if name == _FINISHED and values:
                starts.append(values[0][0])
    if _FINISHED not in series:
        had = ", ".join(sorted(filter(None, series))) or "no named series"
        raise TraceError(
            f"no series {_FINISHED} is in it, which counts the requests; it has {had}. Query the counter itself,"
            " without rate() or sum()"
        )
    scrapes = sorted(series[_FINISHED].increases[_NO_BOUND])
    if not scrapes:
        raise TraceError(f"{_FINISHED} has fewer than two samples: a range needs a step that fits in it twice")
    finished = series[_FINISHED].table(scrapes)[0]
    counts = np.floor(finished + rng.random(len(finished))).astype(np.int64)  # rates times seconds are no whole numbers
    if not (num_requests := int(counts.sum())):
        raise TraceError(f"{_FINISHED} does not increase: no request finished within the range")
    if num_requests > MOST_ROWS:
        raise TraceError(
            f"{num_requests:,} requests are in it; a run plays {MOST_ROWS:,} at most: query a shorter range"
        )
    begins = np.array([min(starts), *scrapes[:-1]])
    interval = np.repeat(np.arange(len(scrapes)), counts)
    at = begins[interval] + rng.random(num_requests) * (np.array(scrapes) - begins)[interval]
    lengths, remarks = [], [f"{num_requests:,} requests finished in {scrapes[-1] - begins[0]:,.0f} s; times are drawn"]
    for histogram, counter in _LENGTHS:
        drawn, remark = _lengths(series, histogram, counter, scrapes, finished, interval, rng)
        lengths.append(drawn)
        remarks.append(remark)
    order = np.argsort(at, kind="stable")[:most]
    rows = np.arange(len(order), dtype=np.int32)
    prompts, outputs = lengths
    return WorkloadColumns(rows, at[order] - begins[0], prompts[order], outputs[order]), remarks


def _read(where: str, entry: object) -> Iterable[tuple[str, float, list[tuple[float, float]]]]:
    """Yield name, bucket's bound and samples of each series of an answer."""
    if not is_range(entry):
        raise TraceError(f"{where}: expected an answer of /api/v1/query_range, found {str(entry)[:60]!r}")
    assert isinstance(entry, Mapping)
    if (kind := entry["data"]["resultType"]) != "matrix":
        raise TraceError(f"{where}: the answer is a {kind}; a range (/api/v1/query_range) is a matrix")
    for result in entry["data"].get("result", ()):
        try:
            labels = result["metric"]
            bound = float(labels.get("le", _NO_BOUND))
            values = [(float(at), float(value)) for at, value in result["values"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{where}: no series of a matrix: {type(error).__name__}: {error}") from None
        yield labels.get("__name__", ""), bound, [one for one in values if math.isfinite(one[1])]


def _lengths(
    series: Mapping[str, _Series],
    histogram: str,
    counter: str,
    scrapes: list[float],
    finished: Floats,
    interval: npt.NDArray[np.int64],
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.int64], str]:
    """Draw a length for each request; return them, and a remark on how."""
    tokens = next((series[name].table(scrapes)[0] for name in (f"{histogram}_sum", counter) if name in series), None)
    mean = None if tokens is None else float(tokens.sum() / finished.sum())
    if (buckets := series.get(f"{histogram}_bucket")) is None:
        if tokens is None or mean is None:
            raise TraceError(f"neither {histogram}_bucket nor {counter} is in it: lengths are not known")
        means = np.where(finished > 0, tokens / np.maximum(finished, 1e-9), mean)[interval]
        return _whole(means), f"{counter}: every request has its interval's mean"
    bounds = np.array(sorted(buckets.increases))
    lower = np.concatenate(([0.0], bounds[:-1]))
    upper = np.where(np.isfinite(bounds), bounds, 2 * lower)
    shares = np.maximum(np.diff(buckets.table(scrapes), axis=0, prepend=0.0), 0.0)
    overall = shares.sum(axis=1)
    if not overall.sum():
        raise TraceError(f"{histogram}_bucket does not increase within the range: lengths are not known")
    shares = np.where(shares.sum(axis=0) > 0, shares, overall[:, None])
    ends = np.cumsum(shares / shares.sum(axis=0), axis=0)[:, interval]
    bucket = np.minimum((rng.random(len(interval)) > ends).sum(axis=0), len(bounds) - 1)
    drawn = lower[bucket] + rng.random(len(interval)) * (upper - lower)[bucket]
    if mean is not None:
        drawn *= mean / drawn.mean()
    scaled = "" if mean is None else f", scaled to their mean of {mean:,.0f}"
    return _whole(drawn), f"{histogram}: lengths drawn from its buckets{scaled}"


def _whole(lengths: Floats) -> npt.NDArray[np.int64]:
    return np.clip(np.rint(lengths), 1, MOST_TOKENS).astype(np.int64)
