"""The figures of one run: distributions, latency by prompt length, phases, groups, failures.

All are exact, over all requests. Percentiles interpolate linearly, as those of `summary.json` do.
"""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lorrery.view.reports.requests import PHASES, Requests

__all__ = [
    "OTHER",
    "Bucket",
    "Failure",
    "Group",
    "Phase",
    "at_ranks",
    "by_length",
    "cumulative",
    "failures",
    "groups",
    "phases",
    "quantiles",
]

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

LEVELS = np.concatenate(
    [np.linspace(0, 0.9, 91), np.linspace(0.91, 0.99, 17), np.linspace(0.991, 0.999, 9), [0.9995, 0.9999, 1.0]]
)
"""Of the quantiles through which a cumulative distribution is drawn."""
OTHER = "other"
_MOST_BUCKETS = 12
_FEWEST_IN_BUCKET = 20


def quantiles(values: Floats, *levels: float) -> list[float]:
    """Return quantiles of the finite values; NaN if there are none."""
    ordered = np.sort(values[np.isfinite(values)])
    if not len(ordered):
        return [float("nan")] * len(levels)
    return [float(one) for one in at_ranks(ordered, np.array(levels))]


def at_ranks(ordered: Floats, levels: Floats) -> Floats:
    """Return quantiles of sorted values; as `numpy.quantile`, which takes a millisecond per call, whatever the size."""
    ranks = levels * (len(ordered) - 1)
    low = np.floor(ranks).astype(np.int64)
    high = np.minimum(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (ranks - low)


def cumulative(values: Floats) -> tuple[Floats, Floats]:
    """Return the points of a cumulative distribution: values, and shares of requests up to them."""
    ordered = np.sort(values[np.isfinite(values)])
    if not len(ordered):
        return np.empty(0), np.empty(0)
    return at_ranks(ordered, LEVELS), LEVELS


@dataclass(frozen=True, slots=True)
class Bucket:
    """Completed requests with prompts of similar length; latencies in seconds."""

    low: int
    high: int
    count: int
    ttft: tuple[float, float, float]
    e2e: tuple[float, float, float]


def by_length(requests: Requests) -> list[Bucket]:
    """Group completed requests by prompt length, in equal factors from the least to the most."""
    done = requests.completed
    lengths = requests["prompt_tokens"][done]
    ttft, e2e = requests.ttft[done], requests.e2e[done]
    known = np.isfinite(lengths) & (lengths > 0)
    lengths, ttft, e2e = lengths[known], ttft[known], e2e[known]
    if not len(lengths):
        return []
    low, high = float(lengths.min()), float(lengths.max())
    num_buckets = max(1, min(_MOST_BUCKETS, len(lengths) // 20, int(np.log2(high / low) * 2) + 1))
    edges = np.unique(np.round(np.geomspace(low, high + 1, num_buckets + 1)))
    which = np.searchsorted(edges, lengths, side="right") - 1
    found = []
    for bucket, (first, after) in enumerate(pairwise(edges.tolist())):
        here = which == bucket
        if (count := int(here.sum())) >= min(_FEWEST_IN_BUCKET, len(lengths)):
            p50, p90, p99 = quantiles(ttft[here], 0.5, 0.9, 0.99)
            whole50, whole90, whole99 = quantiles(e2e[here], 0.5, 0.9, 0.99)
            found.append(Bucket(int(first), int(after) - 1, count, (p50, p90, p99), (whole50, whole90, whole99)))
    return found


@dataclass(frozen=True, slots=True)
class Phase:
    """How the time of some requests was spent.

    Attributes:
        label: which requests.
        seconds: mean of each part of their time.
    """

    label: str
    count: int
    total: float
    seconds: tuple[tuple[str, float], ...]


def phases(requests: Requests, *, to_first_token: bool) -> list[Phase]:
    """Divide the mean time to the first or the last token into its parts: for all, the median and the slowest requests.

    Parts that the files do not separate stay together, under a name that says so. The parts of a request add up to its
    time; in a live run the time that the scheduler did not see is "client and network".
    """
    total = requests.ttft if to_first_token else requests.e2e
    parts = _parts(requests, to_first_token=to_first_token)
    known = np.isfinite(total)
    for values in parts.values():
        known &= np.isfinite(values)
    if not known.any():
        return []
    times = total[known]
    p45, p55, p90, p99 = quantiles(times, 0.45, 0.55, 0.9, 0.99)
    chosen = {
        "all requests": np.ones(len(times), np.bool_),
        "the median 10 %": (times >= p45) & (times <= p55),
        "the slowest 10 %": times >= p90,
        "the slowest 1 %": times >= p99,
    }
    found = []
    for label, which in chosen.items():
        if not which.any():  # few requests have none in the middle
            continue
        whole = float(times[which].mean())
        seconds = {name: max(0.0, float(values[known][which].mean())) for name, values in parts.items()}
        rest = whole - sum(seconds.values())
        if rest > 0.002 * whole:
            seconds["client and network"] = rest
        found.append(Phase(label, int(which.sum()), whole, tuple(seconds.items())))
    return found


def _parts(requests: Requests, *, to_first_token: bool) -> dict[str, Floats]:
    decode = {} if to_first_token else {"decode": requests["last_token_seconds"] - requests["first_token_seconds"]}
    if all(requests.has(name) for name in PHASES):
        queue, load, prefill = (requests[name] for name in PHASES[:3])
        return {"queue": queue, "adapter load": load, "prefill": prefill, **decode}
    if requests.has("queue_seconds"):
        queue = requests["queue_seconds"]
        first = requests["first_token_seconds"] - requests["sent_seconds"]
        return {"queue": queue, "prefill and adapter load": first - queue, **decode}
    return {"until the first token": requests["first_token_seconds"] - requests["sent_seconds"], **decode}


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one adapter, tenant or worker; times in seconds."""

    name: str
    num_requests: int
    num_failed: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    queue: float
    load: float
    ttft: tuple[float, float]
    tpot: tuple[float, float]
    e2e: tuple[float, float]


def groups(requests: Requests, column: str, most: int) -> list[Group]:
    """Group requests by a column of names: the busiest, then all others together as `OTHER`."""
    codes, names = requests.codes[column], requests.names[column]
    counts = np.bincount(codes, minlength=len(names))
    busiest = np.argsort(-counts, kind="stable")
    if len(busiest) > most:
        place = np.full(len(names), most, np.int64)
        place[busiest[:most]] = np.arange(most)
        labels = [*(names[code] for code in busiest[:most].tolist()), f"{OTHER}: {len(busiest) - most:,} more"]
    else:
        place = np.empty(len(names), np.int64)
        place[busiest] = np.arange(len(busiest))
        labels = [names[code] for code in busiest.tolist()]
    which = place[codes]
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(len(labels) + 1))
    columns = {
        "prompt": requests["prompt_tokens"],
        "output": requests["output_tokens"],
        "cached": requests["cached_tokens"],
        "queue": requests["queue_seconds"],
        "load": requests["adapter_load_seconds"],
        "ttft": requests.ttft,
        "tpot": requests.tpot,
        "e2e": requests.e2e,
        "failed": requests.failed.astype(np.float64),
    }
    columns = {name: values[order] for name, values in columns.items()}
    found = []
    for label, start, end in zip(labels, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        own = {name: values[start:end] for name, values in columns.items()}
        latencies = {name: quantiles(own[name], 0.5, 0.99) for name in ("ttft", "tpot", "e2e")}
        found.append(
            Group(
                name=label,
                num_requests=end - start,
                num_failed=int(own["failed"].sum()),
                prompt_tokens=int(np.nansum(own["prompt"])),
                output_tokens=int(np.nansum(own["output"])),
                cached_tokens=int(np.nansum(own["cached"])),
                queue=_mean(own["queue"]),
                load=_mean(own["load"]),
                ttft=(latencies["ttft"][0], latencies["ttft"][1]),
                tpot=(latencies["tpot"][0], latencies["tpot"][1]),
                e2e=(latencies["e2e"][0], latencies["e2e"][1]),
            )
        )
    return found


def _mean(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests that failed in the same way.

    Attributes:
        reason: the message; for messages that differ only in numbers and names, their pattern with an example.
        first_seconds: when the first of them ended.
        last_seconds: when the last of them ended.
        most: the most frequent adapter and tenant among them.
    """

    status: str
    reason: str
    count: int
    num_before_token: int
    first_seconds: float
    last_seconds: float
    most: tuple[str, str]


_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def failures(requests: Requests) -> list[Failure]:
    """Group failures by status and message, the most frequent first."""
    rows = np.flatnonzero(requests.failed)
    statuses = requests.names["status"]
    patterns: dict[str, str] = {}
    kinds: dict[tuple[str, str], list[int]] = {}
    for row in rows.tolist():
        text = requests.details.get(row, "")
        if text not in patterns:
            patterns[text] = _NUMBER.sub("N", _QUOTED.sub("'...'", text))
        kinds.setdefault((statuses[requests.codes["status"][row]], patterns[text]), []).append(row)
    found = []
    for (status, pattern), its_rows in kinds.items():
        at = np.array(its_rows)
        first, last = quantiles(requests["end_seconds"][at], 0.0, 1.0)
        example = requests.details.get(its_rows[0], "")
        are_alike = all(requests.details.get(row, "") == example for row in its_rows)
        reason = example if are_alike else f"{pattern}; such as: {example}"
        before = int(np.isnan(requests["first_token_seconds"][at]).sum())
        most = _most(requests, "adapter_id", at), _most(requests, "tenant_id", at)
        found.append(Failure(status, reason, len(at), before, first, last, most))
    return sorted(found, key=lambda one: -one.count)


def _most(requests: Requests, column: str, rows: npt.NDArray[np.int64]) -> str:
    code, _ = Counter(requests.codes[column][rows].tolist()).most_common(1)[0]
    return requests.names[column][code]
