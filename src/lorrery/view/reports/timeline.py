"""The timeline of a run, in some hundred bins of equal width.

From requests alone: a request waits from its send to its admission, and runs from then to its end; one that was never
admitted waits until it ends, and one that was queued again counts as running from its first admission on. Its output
tokens are spread evenly between its first and its last. Each bin has the mean over its time.

From steps, if their file exists: sequences in a batch and waiting, KV tokens, and how busy workers were, each weighted
by the duration of the steps.
"""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lorrery.service.errors import FormatError
from lorrery.view.reports.columns import read_header, read_rows
from lorrery.view.reports.figures import quantiles
from lorrery.view.reports.requests import Requests
from lorrery.vocabulary.units import PS_PER_SECOND

__all__ = ["Bins", "StepBins", "read_steps", "timeline", "tokens_between"]

Floats = npt.NDArray[np.float64]

NUM_BINS = 120
_MOST_STEP_BYTES = 48 << 20
"""Bytes of a file of steps that are read; of a longer one, evenly spaced pieces."""
_STEP_PIECES = 48
_STEP_COLUMNS = ("start_ps", "step_ps", "decode_sequences", "prefill_sequences", "kv_tokens", "waiting_sequences")


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Means over each bin; all of shape (bins,), NaN if unknown.

    Attributes:
        at: middle of the bin, seconds from the start of the run.
        width: seconds.
        arrivals: requests sent, per second.
        failed: requests that ended in failure, per second.
        output_tokens: per second.
        ttft_at: middles of wider bins if requests are few, for the TTFT of the requests sent in them, seconds.
    """

    at: Floats
    width: float
    waiting: Floats
    running: Floats
    arrivals: Floats
    failed: Floats
    output_tokens: Floats
    ttft_at: Floats
    ttft50: Floats
    ttft99: Floats


@dataclass(frozen=True, slots=True, eq=False)
class StepBins:
    """Means over each bin of all workers together, seconds as in `Bins`.

    Attributes:
        busy: share of the workers' time spent in steps.
        share_read: of the file; 1 unless it is long.
    """

    at: Floats
    batch: Floats
    waiting: Floats
    kv_tokens: Floats
    busy: Floats
    share_read: float


def timeline(requests: Requests) -> Bins:
    """Compute the timeline of a run's requests; a run without any has one empty bin."""
    start, end = requests.start, requests.end
    num_bins = NUM_BINS if end > start else 1
    edges = np.linspace(start, end if end > start else start + 1.0, num_bins + 1)
    width = float(edges[1] - edges[0])
    sent, ended = requests["sent_seconds"], requests["end_seconds"]
    first = requests["first_token_seconds"]
    admitted = np.minimum(sent + requests["queue_seconds"], ended)
    # Without times of admission, waiting and running are not separated.
    told = requests.has("queue_seconds")
    waited_until = np.where(np.isnan(admitted), np.where(np.isnan(first), ended, sent), admitted) if told else sent
    ttft_at, ttft50, ttft99 = _ttft_over_time(edges, requests)
    arrived = np.isfinite(sent)
    failed = requests.failed & np.isfinite(ended)
    return Bins(
        at=(edges[:-1] + edges[1:]) / 2 - start,
        width=width,
        waiting=_integral(edges, sent, waited_until) / width if told else np.full(num_bins, np.nan),
        running=_integral(edges, waited_until, ended) / width,
        arrivals=np.histogram(sent[arrived], edges)[0] / width,
        failed=np.histogram(ended[failed], edges)[0] / width,
        output_tokens=tokens_between(edges, requests, np.ones(len(requests), np.bool_)) / width,
        ttft_at=ttft_at - start,
        ttft50=ttft50,
        ttft99=ttft99,
    )


def tokens_between(edges: Floats, requests: Requests, which: npt.NDArray[np.bool_]) -> Floats:
    """Count output tokens of some requests between neighbouring edges, in seconds; shape (edges - 1,).

    The first token of a request counts at its time, the others evenly from then to the last.
    """
    first, last, ended = (requests[name] for name in ("first_token_seconds", "last_token_seconds", "end_seconds"))
    stops = np.where(np.isnan(last), ended, np.fmin(last, ended))
    gaps = requests["output_tokens"] - 1
    has_stream = which & np.isfinite(first) & np.isfinite(stops) & (stops > first) & (gaps > 0)
    tokens = _integral(edges, first[has_stream], stops[has_stream], gaps[has_stream] / (stops - first)[has_stream])
    produced = which & np.isfinite(first) & (requests["output_tokens"] > 0)
    at_once = np.where(has_stream, 1.0, requests["output_tokens"])[produced]
    tokens += np.histogram(first[produced], edges, weights=at_once)[0]
    return tokens


def _integral(edges: Floats, starts: Floats, ends: Floats, heights: Floats | None = None) -> Floats:
    """Integrate over each bin the sum of `heights` (or of 1) of all intervals that cover a moment."""
    known = np.isfinite(starts) & np.isfinite(ends) & (ends > starts)
    starts, ends = starts[known], ends[known]
    weights = np.ones(len(starts)) if heights is None else heights[known]
    total = np.zeros(len(edges))
    # An interval's integral up to t is (t - start)+ - (t - end)+, so sums of sorted times give all edges at once.
    for times, sign in ((starts, 1.0), (ends, -1.0)):
        order = np.argsort(times)
        ordered = times[order]
        summed = np.concatenate(([0.0], np.cumsum(weights[order])))
        moments = np.concatenate(([0.0], np.cumsum(weights[order] * ordered)))
        before = np.searchsorted(ordered, edges)
        total += sign * (edges * summed[before] - moments[before])
    return np.maximum(np.diff(total), 0.0)


def _ttft_over_time(edges: Floats, requests: Requests) -> tuple[Floats, Floats, Floats]:
    """Return middles of bins with some requests each, and p50 and p99 of the TTFT of those sent in them."""
    done = requests.completed
    sent, ttft = requests["sent_seconds"][done], requests.ttft[done]
    num_bins = max(1, min(len(edges) - 1, len(sent) // 25))
    wide = np.linspace(edges[0], edges[-1], num_bins + 1)
    which = np.clip(np.searchsorted(wide, sent, side="right") - 1, 0, num_bins - 1)
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(num_bins + 1))
    ordered = ttft[order]
    found = np.full((2, num_bins), np.nan)
    for place, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        if high > low:
            found[:, place] = quantiles(ordered[low:high], 0.5, 0.99)
    known = np.isfinite(found[0])
    return ((wide[:-1] + wide[1:]) / 2)[known], found[0][known], found[1][known]


def read_steps(path: Path, bins: Bins, warnings: list[str]) -> StepBins | None:
    """Read a file of steps into bins like those of the requests; None if it cannot be used, with a warning.

    A file of more than some ten megabytes is read in evenly spaced pieces; times outside them are unknown.
    """
    num_bins = len(bins.at)
    sums = np.zeros((5, num_bins))
    workers: dict[str, int] = {}
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = read_header(file, path)
            if any(name not in header for name in ("worker", *_STEP_COLUMNS)):
                warnings.append(f"{path.name}: not a file of steps; the timeline is of requests alone")
                return None
            begin = file.tell()
            share = min(1.0, _MOST_STEP_BYTES / max(size, 1))
            pieces = [(begin, size)] if share == 1.0 else _spread(begin, size)
            for place, (low, high) in enumerate(pieces):
                file.seek(low)
                if place:
                    file.readline()
                text = file.read(high - file.tell()) + (file.readline() if share < 1.0 else b"")
                _add_steps(path, text, header, bins, sums, workers, warnings)
    except (OSError, FormatError) as error:
        warnings.append(f"{path.name} cannot be used ({error}); the timeline is of requests alone")
        return None
    if not workers:
        return None
    seconds = sums[0]
    # For a file read in pieces a bin has the means over the part read; batches of workers add up.
    with np.errstate(divide="ignore", invalid="ignore"):
        if share == 1.0:
            batch, waiting, kv = sums[1] / bins.width, sums[2] / bins.width, sums[3] / bins.width
            busy = seconds / bins.width / len(workers)
        else:
            batch, waiting, kv = (np.where(seconds > 0, row / seconds * len(workers), np.nan) for row in sums[1:4])
            busy = np.full(num_bins, np.nan)
    return StepBins(bins.at, batch, waiting, kv, busy, share)


def _spread(begin: int, size: int) -> list[tuple[int, int]]:
    length = _MOST_STEP_BYTES // _STEP_PIECES
    places = np.linspace(begin, size - length, _STEP_PIECES).astype(np.int64).tolist()
    return [(place, place + length) for place in places]


def _add_steps(
    path: Path, text: bytes, header: list[str], bins: Bins, sums: Floats, workers: dict[str, int], warnings: list[str]
) -> None:
    for rows in read_rows(BytesIO(text), path, len(header), warnings):
        start, step, decodes, prefills, kv, waiting = (rows.floats(header.index(name)) for name in _STEP_COLUMNS)
        rows.codes(header.index("worker"), workers)
        first = float(bins.at[0]) - bins.width / 2
        which = np.clip(((start / PS_PER_SECOND - first) / bins.width).astype(np.int64), 0, len(bins.at) - 1)
        seconds = step / PS_PER_SECOND
        for row, values in enumerate((None, decodes + prefills, waiting, kv)):
            weights = seconds if values is None else seconds * values
            sums[row] += np.bincount(which, weights=weights, minlength=len(bins.at))
