"""The usual figures of a run, from outcomes. Which formula each is, stands in `FORMULAS` and goes into every report.

With s the origin, t1 and tn the arrivals of the first and last token, n the number of output tokens:

    TTFT = t1 - s        E2E = tn - s        TPOT = (E2E - TTFT) / (n - 1), n > 1 only        normalised TPOT = E2E / n
    ITL  = gaps between tokens, pooled over all requests

TTFT, E2E and normalised TPOT come from two origins. From the *intended* send time they contain what a late client or a
stalled server made later requests wait (no coordinated omission); from the *sent* time they are what most other tools
report. TPOT and ITL have no origin. TPOT is vLLM's and inference-perf's, and what guidellm and aiperf call ITL;
normalised TPOT is S-LoRA's "per output token" and guidellm's TPOT.

A message that brings k tokens after a gap g counts as k gaps of g / k; the tokens of a request's first message make no
gap. So a request's gaps always add up to tn - t1, however the router coalesced.

Percentiles interpolate linearly. Only completed requests count in latencies and tokens/s; the run lasts from the first
send to the last end of any measured request.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.workload.outcome import INTERRUPTED, OK, RequestOutcome

__all__ = [
    "BASE_MODEL",
    "FORMULAS",
    "AdapterSummary",
    "Distribution",
    "OriginLatencies",
    "Summary",
    "distribution",
    "summarise",
    "token_gaps",
]

BASE_MODEL = "(base model)"
"""Name in per-adapter figures of requests without an adapter."""

FORMULAS = {
    "ttft_ms": "first token - s",
    "e2e_ms": "last token - s",
    "tpot_ms": "(E2E - TTFT) / (output tokens - 1), requests of 2 output tokens or more",
    "norm_tpot_ms": "E2E / output tokens",
    "itl_ms": "gaps between tokens, pooled over requests; k tokens in one message after a gap g are k gaps of g / k",
    "send_delay_ms": "sent - intended send time",
    "s": "the intended send time under from_intended, the actual one under from_sent",
    "output_tokens_per_second": "output tokens of completed requests / duration",
    "duration_seconds": "first send to last end, measured requests",
    "percentiles": "linear interpolation",
    "time": "device seconds: wall time / time_scale",
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample's size, mean and percentiles, in the sample's unit; all 0 where the sample is empty."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class OriginLatencies:
    """The latencies that depend on where the clock starts."""

    ttft_ms: Distribution
    e2e_ms: Distribution
    norm_tpot_ms: Distribution


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """One adapter's share; latencies from the intended send time."""

    adapter_id: str
    num_requests: int
    num_failed: int
    output_tokens: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of a run.

    Attributes:
        by_status: number of requests per status, `OK` included.
        tokens_per_message: mean over all messages, 1 unless the router coalesced; 0 if none arrived.
        adapters: the busiest first (requests, then name).
    """

    num_requests: int
    num_completed: int
    num_failed: int
    num_interrupted: int
    by_status: dict[str, int]
    duration_seconds: float
    requests_per_second: float
    input_tokens: int
    output_tokens: int
    input_tokens_per_second: float
    output_tokens_per_second: float
    cached_tokens: int
    num_requeues: int
    tokens_per_message: float
    from_intended: OriginLatencies
    from_sent: OriginLatencies
    tpot_ms: Distribution
    itl_ms: Distribution
    send_delay_ms: Distribution
    adapters: tuple[AdapterSummary, ...]


def distribution(values: npt.NDArray[np.float64]) -> Distribution:
    """Describe a sample, shape (n,)."""
    if not len(values):
        return Distribution()
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Distribution(len(values), float(values.mean()), p50, p90, p99)


def token_gaps(
    message_seconds: npt.NDArray[np.float64], message_tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Give one request's gaps between tokens, seconds; shape (output tokens - tokens of the first message,)."""
    if len(message_seconds) < 2:  # no gap without a second message
        return np.empty(0, np.float64)
    tokens = message_tokens[1:]
    return np.repeat(np.diff(message_seconds) / tokens, tokens)


def summarise(outcomes: Iterable[RequestOutcome]) -> Summary:
    """Compute all figures of a run's measured requests (leave its warm-up out)."""
    every = list(outcomes)
    completed = [outcome for outcome in every if _has_latency(outcome)]
    columns = _columns(completed)
    num_interrupted = sum(outcome.status == INTERRUPTED for outcome in every)
    num_ok = sum(outcome.status == OK for outcome in every)
    duration = 0.0
    if every:
        duration = max(outcome.end_seconds for outcome in every) - min(outcome.sent_seconds for outcome in every)
    input_tokens = sum(outcome.prompt_tokens for outcome in completed)
    output_tokens = int(columns.output_tokens.sum())
    num_messages = sum(len(outcome.message_tokens) for outcome in completed)
    gaps = [token_gaps(outcome.message_seconds, outcome.message_tokens) for outcome in completed]
    per_second = 1 / duration if duration > 0 else 0.0
    return Summary(
        num_requests=len(every),
        num_completed=num_ok,
        num_failed=len(every) - num_ok - num_interrupted,
        num_interrupted=num_interrupted,
        by_status=dict(sorted(Counter(outcome.status for outcome in every).items())),
        duration_seconds=duration,
        requests_per_second=num_ok * per_second,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        input_tokens_per_second=input_tokens * per_second,
        output_tokens_per_second=output_tokens * per_second,
        cached_tokens=sum(outcome.cached_tokens for outcome in completed),
        num_requeues=sum(outcome.num_requeues for outcome in every),
        tokens_per_message=output_tokens / num_messages if num_messages else 0.0,
        from_intended=_latencies(columns, columns.intended),
        from_sent=_latencies(columns, columns.sent),
        tpot_ms=_tpot(columns),
        itl_ms=distribution(np.concatenate(gaps) * 1e3 if gaps else np.empty(0, np.float64)),
        send_delay_ms=distribution(
            np.array([outcome.sent_seconds - outcome.intended_seconds for outcome in every], np.float64) * 1e3
        ),
        adapters=_adapters(every),
    )


@dataclass(frozen=True, slots=True)
class _Columns:
    intended: npt.NDArray[np.float64]
    sent: npt.NDArray[np.float64]
    first: npt.NDArray[np.float64]
    last: npt.NDArray[np.float64]
    output_tokens: npt.NDArray[np.int64]


def _has_latency(outcome: RequestOutcome) -> bool:
    return outcome.status == OK and len(outcome.message_seconds) > 0


def _columns(completed: Sequence[RequestOutcome]) -> _Columns:
    times = np.array(
        [
            (outcome.intended_seconds, outcome.sent_seconds, outcome.message_seconds[0], outcome.message_seconds[-1])
            for outcome in completed
        ],
        np.float64,
    ).reshape(len(completed), 4)
    output_tokens = np.array([outcome.output_tokens for outcome in completed], np.int64)
    return _Columns(times[:, 0], times[:, 1], times[:, 2], times[:, 3], output_tokens)


def _latencies(columns: _Columns, origin: npt.NDArray[np.float64]) -> OriginLatencies:
    e2e = columns.last - origin
    return OriginLatencies(
        ttft_ms=distribution((columns.first - origin) * 1e3),
        e2e_ms=distribution(e2e * 1e3),
        norm_tpot_ms=distribution(e2e / columns.output_tokens * 1e3),
    )


def _tpot(columns: _Columns) -> Distribution:
    several = columns.output_tokens > 1
    spans = (columns.last - columns.first)[several]
    return distribution(spans / (columns.output_tokens[several] - 1) * 1e3)


def _adapters(every: Sequence[RequestOutcome]) -> tuple[AdapterSummary, ...]:
    groups: dict[str, list[RequestOutcome]] = {}
    for outcome in every:
        groups.setdefault(outcome.adapter_id or BASE_MODEL, []).append(outcome)
    busiest = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return tuple(_adapter(adapter_id, group) for adapter_id, group in busiest)


def _adapter(adapter_id: str, group: Sequence[RequestOutcome]) -> AdapterSummary:
    columns = _columns([outcome for outcome in group if _has_latency(outcome)])
    latencies = _latencies(columns, columns.intended)
    return AdapterSummary(
        adapter_id=adapter_id,
        num_requests=len(group),
        num_failed=sum(outcome.status not in (OK, INTERRUPTED) for outcome in group),
        output_tokens=int(columns.output_tokens.sum()),
        ttft_ms=latencies.ttft_ms,
        tpot_ms=_tpot(columns),
        e2e_ms=latencies.e2e_ms,
    )
