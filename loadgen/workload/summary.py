"""The usual figures of a run, from outcomes. Their formulas are in `FORMULAS` and in every report.

With s the origin, t1 and tn the arrivals of the first and last token, n the number of output tokens:

    TTFT = t1 - s        E2E = tn - s        TPOT = (E2E - TTFT) / (n - 1), n > 1 only        normalised TPOT = E2E / n
    ITL  = gaps between tokens, pooled over all requests

TTFT, E2E and normalised TPOT come from two origins. From the *intended* send time they include the delay that a late
client or a stalled server causes to later requests (no coordinated omission); from the *sent* time they are what most
other tools report. TPOT and ITL have no origin. TPOT is as in vLLM and inference-perf; guidellm and aiperf call it ITL;
normalised TPOT is S-LoRA's "per output token" and guidellm's TPOT.

A message that brings k tokens after a gap g counts as k gaps of g / k; the tokens of a request's first message have no
gaps. So a request's gaps always add up to tn - t1, however the router coalesced.

Percentiles interpolate linearly. Only completed requests count in TTFT, E2E, TPOT and tokens/s; ITL pools the gaps of
failed ones, too. The run lasts from the first send to the last end of any measured request.

Jain, Chiu and Hawe (DEC-TR-301, 1984) measure how evenly n tenants were served: with x_i the tokens of tenant i,
prompts and outputs of completed requests,

    J = (sum x_i)^2 / (n * sum x_i^2)

1 if all got the same, 1 / n if one got everything. It ignores what tenants asked for: if they ask for different
amounts, even perfect service is below 1.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.distribution import Distribution, distribution
from lorrery.loadgen.workload.outcome import OutcomeTable


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """One tenant's share; TTFT from the intended send time, 0 if nothing completed."""

    tenant_id: str
    num_requests: int
    num_completed: int
    served_tokens: int
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, slots=True)
class Fairness:
    """How evenly the tenants of a run were served.

    Attributes:
        jain_index: of `served_tokens`.
        tenants: by name.
    """

    jain_index: float
    tenants: tuple[TenantSummary, ...]


def jain_index(served: Iterable[float]) -> float:
    """Return Jain's index; 1 if no tenant was served."""
    amounts = np.fromiter(served, np.float64)
    squares = float((amounts**2).sum())
    return float(amounts.sum()) ** 2 / (len(amounts) * squares) if squares else 1.0


def fairness(table: OutcomeTable) -> Fairness | None:
    """Return how evenly tenants were served; None if no request names one."""
    rows_of = dict(table.tenant_id.rows_of())
    if not any(rows_of):
        return None
    completed = table.completed
    tokens, ttft = table.prompt_tokens + table.output_tokens, table.first_token_seconds - table.intended_seconds
    found: list[TenantSummary] = []
    for tenant_id, its_rows in sorted(rows_of.items()):
        rows = its_rows[completed[its_rows]]
        p50, p99 = (np.quantile(ttft[rows], (0.5, 0.99)) * 1e3).tolist() if len(rows) else (0.0, 0.0)
        found.append(TenantSummary(tenant_id, len(its_rows), len(rows), int(tokens[rows].sum()), p50, p99))
    return Fairness(jain_index(tenant.served_tokens for tenant in found), tuple(found))


BASE_MODEL = "(base model)"
"""Name of requests without an adapter in per-adapter figures."""

FORMULAS = {
    "ttft_ms": "first token - s",
    "e2e_ms": "last token - s",
    "tpot_ms": "(E2E - TTFT) / (output tokens - 1), requests of 2 output tokens or more",
    "norm_tpot_ms": "E2E / output tokens",
    "itl_ms": "gaps between tokens, pooled; k tokens in one message after a gap g are k gaps of g / k",
    "send_delay_ms": "sent - intended send time",
    "s": "the intended send time under from_intended, the actual one under from_sent",
    "output_tokens_per_second": "output tokens of completed requests / duration",
    "duration_seconds": "first send to last end, measured requests",
    "requests": "ttft_ms, e2e_ms, tpot_ms, norm_tpot_ms: completed ones; itl_ms: all, also those that failed later",
    "percentiles": "linear interpolation",
    "time": "device seconds: wall time / time_scale",
}


@dataclass(frozen=True, slots=True)
class OriginLatencies:
    """The latencies that depend on the origin of time."""

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
        num_failed_before_token: failed requests without any token; the others failed during their streams.
        tokens_per_message: mean over all messages, 1 unless the router coalesced; 0 if none arrived.
        adapters: the busiest first (requests, then name).
        fairness: between tenants; None if no request names one.
    """

    num_requests: int
    num_completed: int
    num_failed: int
    num_failed_before_token: int
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
    fairness: Fairness | None = None


def summarise(table: OutcomeTable) -> Summary:
    """Compute all figures of a run's measured requests (leave its warm-up out)."""
    has_latency = table.completed
    completed = _Latencies.of(table, np.flatnonzero(has_latency))
    num_interrupted, num_ok = int(table.interrupted.sum()), int(table.ok.sum())
    duration = float(table.end_seconds.max() - table.sent_seconds.min()) if len(table) else 0.0
    num_messages = int(table.num_messages[has_latency].sum())
    per_second = 1 / duration if duration > 0 else 0.0
    input_tokens, output_tokens = int(completed.prompt_tokens.sum()), int(completed.output_tokens.sum())
    return Summary(
        num_requests=len(table),
        num_completed=num_ok,
        num_failed=len(table) - num_ok - num_interrupted,
        num_failed_before_token=int((table.failed & np.isnan(table.first_token_seconds)).sum()),
        num_interrupted=num_interrupted,
        by_status=dict(sorted(Counter(table.status).items())),
        duration_seconds=duration,
        requests_per_second=num_ok * per_second,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        input_tokens_per_second=input_tokens * per_second,
        output_tokens_per_second=output_tokens * per_second,
        cached_tokens=int(table.cached_tokens[has_latency].sum()),
        num_requeues=int(table.num_requeues.sum()),
        tokens_per_message=output_tokens / num_messages if num_messages else 0.0,
        from_intended=completed.from_origin(table.intended_seconds),
        from_sent=completed.from_origin(table.sent_seconds),
        tpot_ms=completed.tpot_ms(),
        itl_ms=table.itl_ms,
        send_delay_ms=distribution((table.sent_seconds - table.intended_seconds) * 1e3),
        adapters=_adapters(table),
        fairness=fairness(table),
    )


@dataclass(frozen=True, slots=True)
class _Latencies:
    """Computes the latencies of some requests; each column is read on demand.

    Attributes:
        which: rows.
    """

    table: OutcomeTable
    which: npt.NDArray[np.int64] | slice

    @classmethod
    def of(cls, table: OutcomeTable, rows: npt.NDArray[np.int64]) -> "_Latencies":
        """Select these rows, which are ascending; selecting all makes no copies."""
        return cls(table, slice(None) if len(rows) == len(table) else rows)

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        return self.table.prompt_tokens[self.which]

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        return self.table.output_tokens[self.which]

    def from_origin(self, origin_seconds: npt.NDArray[np.float64]) -> OriginLatencies:
        """Summarise the latencies that depend on the origin, given for all requests of the table."""
        origin = origin_seconds[self.which]
        ttft = self.table.first_token_seconds[self.which] - origin
        e2e = self.table.last_token_seconds[self.which] - origin
        return OriginLatencies(
            ttft_ms=distribution(ttft * 1e3),
            e2e_ms=distribution(e2e * 1e3),
            norm_tpot_ms=distribution(e2e / self.output_tokens * 1e3),
        )

    def tpot_ms(self) -> Distribution:
        """Summarise TPOT, for requests with two output tokens or more."""
        tokens = self.output_tokens
        several = tokens > 1
        spans = (self.table.last_token_seconds[self.which] - self.table.first_token_seconds[self.which])[several]
        return distribution(spans / (tokens[several] - 1) * 1e3)


def _adapters(table: OutcomeTable) -> tuple[AdapterSummary, ...]:
    failed, completed = table.failed, table.completed
    by_adapter = [(adapter_id or BASE_MODEL, rows) for adapter_id, rows in table.adapter_id.rows_of()]
    found: list[AdapterSummary] = []
    for adapter_id, rows in sorted(by_adapter, key=lambda entry: (-len(entry[1]), entry[0])):
        its = _Latencies.of(table, rows[completed[rows]])
        latencies = its.from_origin(table.intended_seconds)
        found.append(
            AdapterSummary(
                adapter_id=adapter_id,
                num_requests=len(rows),
                num_failed=int(failed[rows].sum()),
                output_tokens=int(its.output_tokens.sum()),
                ttft_ms=latencies.ttft_ms,
                tpot_ms=its.tpot_ms(),
                e2e_ms=latencies.e2e_ms,
            )
        )
    return tuple(found)
