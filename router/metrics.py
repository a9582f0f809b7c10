"""The metrics of a router. TTFT and E2E count from the arrival at the router.

Per-message counts are plain integers; per-frame values are recorded once for all messages of a frame.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from lorrery.router.engine_metrics import EdgeEngine
from lorrery.service.faults.kinds import REQUEST_KINDS
from lorrery.service.settings.sections import MetricsSettings
from lorrery.service.telemetry.series import Exporter, Histogram, Sample, Series, table
from lorrery.service.telemetry.top_names import TopNames
from lorrery.vocabulary.objectives import LAG_SECONDS, MISSED_OUTCOMES, TPOT_SECONDS, TTFT_SECONDS

OUTCOMES = (
    "ok",
    "cancelled",
    "aborted",
    "deadline",
    "invalid",
    "not_found",
    "overloaded",
    "over_quota",
    "unattainable",
    "rank_over_limit",
    "unauthenticated",
    "denied",
    "unavailable",
    "fault",
    "failed",
)

# vLLM's buckets, so that dashboards made for it fit, with more bounds where vLLM's are too coarse for percentiles: its
# first bound for TPOT, 10 ms, exceeds a whole decode step of an H100, and prefills of 0.1 to 0.25 s fall into one
# bucket.
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TPOT_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_BUCKETS = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS_PER_MESSAGE_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0, 4096.0)
_LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_WALL_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 60.0)
# vLLM's for lengths: 1, 2, 5 times powers of ten.
_LENGTH_BUCKETS = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0),
    *(100_000.0, 200_000.0),
)
# Fewer buckets for series with one histogram per adapter or tenant.
_TTFT_BY_NAME_BUCKETS = (0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0, 60.0)

REQUESTS = Series(
    "lorrery_router_requests_total",
    "requests",
    "Generate calls that have ended, by outcome.",
    ("outcome",),
    more="`ok`, `cancelled` (by the client), `aborted` (by an engine's `Abort`), `deadline`, `invalid`, `not_found`,"
    " `overloaded`, `over_quota` (of its key), `unattainable`, `rank_over_limit`, `unauthenticated`, `denied`,"
    " `unavailable`, `fault` (injected), `failed`.",
)
ADAPTER_REQUESTS = Series(
    "lorrery_router_adapter_requests_total",
    "requests",
    "Generate calls that have ended, by adapter and outcome.",
    ("adapter", "outcome"),
    more="Requests for an unknown adapter count as `other`.",
)
TENANT_REQUESTS = Series(
    "lorrery_router_tenant_requests_total",
    "requests",
    "Generate calls that have ended, by tenant and outcome.",
    ("tenant", "outcome"),
    more="Calls refused before their tenant was known count as `none`.",
)
OPEN_HANDLERS = Series("lorrery_router_open_handlers", "requests", "Generate calls that have not returned.")
IN_FLIGHT = Series("lorrery_router_in_flight_requests", "requests", "Requests in flight at a shard.")
WAITING = Series("lorrery_router_waiting_for_shard_requests", "requests", "Requests waiting for a shard to connect.")
SHARD_CONNECTED = Series(
    "lorrery_router_shard_connected", "1 or 0", "1 while the Route stream to this scheduler is up.", ("shard",)
)
PROMPT_TOKENS = Series(
    "lorrery_router_prompt_tokens_total", "tokens", "Prompt tokens of completed requests, counted at completion."
)
ADAPTER_PROMPT_TOKENS = Series(
    "lorrery_router_adapter_prompt_tokens_total",
    "tokens",
    "Prompt tokens of completed requests, by adapter.",
    ("adapter",),
)
TENANT_PROMPT_TOKENS = Series(
    "lorrery_router_tenant_prompt_tokens_total",
    "tokens",
    "Prompt tokens of completed requests, by tenant.",
    ("tenant",),
)
OUTPUT_TOKENS = Series("lorrery_router_output_tokens_total", "tokens", "Tokens written to clients.")
ADAPTER_OUTPUT_TOKENS = Series(
    "lorrery_router_adapter_output_tokens_total", "tokens", "Tokens written to clients, by adapter.", ("adapter",)
)
TENANT_OUTPUT_TOKENS = Series(
    "lorrery_router_tenant_output_tokens_total", "tokens", "Tokens written to clients, by tenant.", ("tenant",)
)
MESSAGES = Series("lorrery_router_messages_total", "messages", "Messages written to clients.")
DROPPED_TOKENS = Series(
    "lorrery_router_dropped_tokens_total",
    "tokens",
    "Tokens that arrived after their request had ended, for example after a cancellation.",
)
PROMPT_LENGTH = Series(
    "lorrery_router_prompt_length_tokens",
    "tokens",
    "Prompt length of a completed request.",
    buckets=_LENGTH_BUCKETS,
)
OUTPUT_LENGTH = Series(
    "lorrery_router_output_length_tokens",
    "tokens",
    "Output length of a completed request.",
    buckets=_LENGTH_BUCKETS,
)
TTFT = Series(
    "lorrery_router_time_to_first_token_seconds",
    "device seconds",
    "TTFT: from the arrival of a request until its first token is written.",
    buckets=_TTFT_BUCKETS,
)
ADAPTER_TTFT = Series(
    "lorrery_router_adapter_time_to_first_token_seconds",
    "device seconds",
    "TTFT by adapter.",
    ("adapter",),
    _TTFT_BY_NAME_BUCKETS,
)
TENANT_TTFT = Series(
    "lorrery_router_tenant_time_to_first_token_seconds",
    "device seconds",
    "TTFT by tenant.",
    ("tenant",),
    _TTFT_BY_NAME_BUCKETS,
)
TPOT = Series(
    "lorrery_router_time_per_output_token_seconds",
    "device seconds",
    "TPOT: (E2E - TTFT) / (output tokens - 1), one value per completed request with at least two tokens.",
    buckets=_TPOT_BUCKETS,
)
ITL = Series(
    "lorrery_router_inter_token_latency_seconds",
    "device seconds",
    "ITL: gap between two tokens of a stream, one value per token except the first.",
    buckets=_TPOT_BUCKETS,
    more="The gap before a message is divided evenly among its tokens. Between the first token and the last, gaps are"
    " measured between the arrivals of the scheduler's frames.",
)
E2E = Series(
    "lorrery_router_e2e_request_latency_seconds",
    "device seconds",
    "E2E: from the arrival of a completed request until its last message is written.",
    buckets=_E2E_BUCKETS,
)
ADMISSION = Series(
    "lorrery_router_admission_wall_seconds",
    "wall seconds",
    "From the arrival of a request until it is first sent to a scheduler: parsing, tokenizing, waiting for a shard.",
    buckets=_WALL_BUCKETS,
)
STREAM_OUT = Series(
    "lorrery_router_stream_out_wall_seconds",
    "wall seconds",
    "From the arrival of a frame of tokens until its messages are written, one value per message.",
    buckets=_WALL_BUCKETS,
    more="All messages of a frame have the value of the last one. Tokens held back for a fuller message count with the"
    " message that carries them.",
)
TOKENS_PER_MESSAGE = Series(
    "lorrery_router_tokens_per_message_tokens",
    "tokens",
    "Tokens per message to a client; above 1 where the router is behind and coalesces tokens.",
    buckets=_TOKENS_PER_MESSAGE_BUCKETS,
)
LAG = Series(
    "lorrery_router_lag_wall_seconds",
    "wall seconds",
    "How long a frame of tokens waited for the event loop; grows where the router is short of CPU.",
    buckets=_LAG_BUCKETS,
)
RESUMED = Series("lorrery_router_resumed_total", "requests", "Requests resubmitted after their shard was lost.")
FAULTS = Series(
    "lorrery_router_faults_total",
    "faults",
    "Injected faults that affected requests, by kind.",
    ("kind",),
    more="See [faults](failures.md#faults-on-request).",
)
SLOW_READERS = Series(
    "lorrery_router_slow_readers_total",
    "requests",
    "Streams ended because their reader let more than max_pending_tokens accumulate, or read nothing for"
    " reader_timeout_seconds.",
)

TABLE = table(globals())


_NAMES_NO_ADAPTER = frozenset({"invalid", "not_found", "unauthenticated", "denied"})
"""Outcomes that leave open whether the adapter exists, so they give it no series of its own."""


DEFAULT = MetricsSettings()


class Traffic:
    """Counts for the requests of one adapter or tenant."""

    __slots__ = ("output_tokens", "prompt_tokens", "requests", "ttft")

    def __init__(self) -> None:
        self.requests = dict.fromkeys(OUTCOMES, 0)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.ttft = Histogram(ADAPTER_TTFT.buckets)

    def ended(self, outcome: str) -> None:
        """Count a finished request."""
        self.requests[outcome] += 1


class RouterMetrics:
    """All metrics of a router; make one per process.

    Args:
        registry: where they are registered.
        limits: how many adapters and tenants have series of their own.
        engine: metrics of the HTTP edge under other engines' names; None: off.
    """

    def __init__(
        self, registry: CollectorRegistry, limits: MetricsSettings = DEFAULT, engine: EdgeEngine | None = None
    ) -> None:
        self.engine = engine
        shown = self._shown = Exporter(registry, TABLE)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.messages = 0
        self.dropped_tokens = 0
        shown.value(PROMPT_TOKENS, lambda: self.prompt_tokens)
        shown.value(OUTPUT_TOKENS, lambda: self.output_tokens)
        shown.value(MESSAGES, lambda: self.messages)
        shown.value(DROPPED_TOKENS, lambda: self.dropped_tokens)
        self.prompt_length = shown.histogram(PROMPT_LENGTH)
        self.output_length = shown.histogram(OUTPUT_LENGTH)
        self.ttft = shown.histogram(TTFT)
        self.tpot = shown.histogram(TPOT)
        self.itl = shown.histogram(ITL)
        self.e2e = shown.histogram(E2E)
        self.admission = shown.histogram(ADMISSION)
        self.stream_out = shown.histogram(STREAM_OUT)
        self.tokens_per_message = shown.histogram(TOKENS_PER_MESSAGE)
        self.lag = shown.histogram(LAG)
        self._gap_seconds, self._gap_tokens, self._num_gaps = 0.0, 0, 0
        self._requests = shown.numbers(REQUESTS, *OUTCOMES)
        self.resumed = shown.number(RESUMED)
        self.slow_readers = shown.number(SLOW_READERS)
        self.faults = shown.numbers(FAULTS, *sorted(REQUEST_KINDS))
        self._connected = shown.numbers(SHARD_CONNECTED)
        self.adapters = TopNames(limits.max_adapters, Traffic, "base")
        self.tenants = TopNames(limits.max_tenants, Traffic, "none")
        self._show(self.adapters, ADAPTER_REQUESTS, ADAPTER_PROMPT_TOKENS)
        self._show_more(self.adapters, ADAPTER_OUTPUT_TOKENS, ADAPTER_TTFT)
        self._show(self.tenants, TENANT_REQUESTS, TENANT_PROMPT_TOKENS)
        self._show_more(self.tenants, TENANT_OUTPUT_TOKENS, TENANT_TTFT)

    def _show(self, top: TopNames[Traffic], requests: Series, prompt_tokens: Series) -> None:
        def by_outcome() -> list[Sample]:
            return [
                ((label, outcome), number)
                for label, traffic in top.shown()
                for outcome, number in traffic.requests.items()
            ]

        self._shown.read(requests, by_outcome)
        self._shown.read(prompt_tokens, lambda: [((label,), one.prompt_tokens) for label, one in top.shown()])

    def _show_more(self, top: TopNames[Traffic], output_tokens: Series, ttft: Series) -> None:
        self._shown.read(output_tokens, lambda: [((label,), one.output_tokens) for label, one in top.shown()])
        self._shown.read(ttft, lambda: [((label,), one.ttft) for label, one in top.shown()])

    def objectives(self) -> list[tuple[str, int, int]]:
        """Return, of each objective, its name, what counts towards it so far, and what has missed it."""
        missed = round(sum(self._requests.labels(outcome).value for outcome in MISSED_OUTCOMES))
        return [
            ("served", round(self._requests.labels("ok").value) + missed, missed),
            ("ttft", *_above(self.ttft, TTFT, TTFT_SECONDS)),
            ("tpot", *_above(self.tpot, TPOT, TPOT_SECONDS)),
            ("lag", *_above(self.lag, LAG, LAG_SECONDS)),
        ]

    def watch(
        self,
        *,
        open_handlers: Callable[[], float],
        in_flight: Callable[[], float],
        waiting: Callable[[], float],
    ) -> None:
        """Set the sources of the gauges."""
        self._shown.value(OPEN_HANDLERS, open_handlers)
        self._shown.value(IN_FLIGHT, in_flight)
        self._shown.value(WAITING, waiting)

    def shard_connected(self, address: str, connected: bool) -> None:
        """Record that a Route stream is up or down."""
        self._connected.labels(address).set(connected)

    def shard_left(self, address: str) -> None:
        """Remove a shard's series."""
        self._connected.forget(address)

    def request_ended(
        self, outcome: str, adapter_id: str | None = None, tenant_id: str | None = None, *, started: bool = False
    ) -> None:
        """Count one Generate call.

        Args:
            outcome: one of `OUTCOMES`.
            adapter_id: the adapter that it named; empty: the base model; None: unknown.
            tenant_id: its tenant; None: unknown.
            started: whether it has already been counted as traffic.
        """
        self._requests.labels(outcome).inc()
        adapters, tenants = self.adapters, self.tenants
        if adapter_id is None:
            adapters.other.ended(outcome)
        else:
            is_traffic = not started and outcome not in _NAMES_NO_ADAPTER
            (adapters.count if is_traffic else adapters.of)(adapter_id).ended(outcome)
        (tenants.of if started else tenants.count)(tenant_id or "").ended(outcome)

    def tokens_written(self, gap_seconds: float, num_tokens: int) -> None:
        """Count a message after a stream's first, and the gaps of its tokens; shown after `flush`.

        Streams of one step usually have equal gaps and are then recorded together.

        Args:
            gap_seconds: gap before each of the tokens, in device seconds.
            num_tokens: tokens in the message.
        """
        if gap_seconds != self._gap_seconds or num_tokens != self._gap_tokens:
            self.flush()
            self._gap_seconds, self._gap_tokens = gap_seconds, num_tokens
        self._num_gaps += 1

    def flush(self) -> None:
        """Record what `tokens_written` has collected; called after each frame of tokens."""
        if self._num_gaps:
            self.itl.observe_many(self._gap_seconds, self._gap_tokens * self._num_gaps)
            if self.engine is not None:
                self.engine.gaps(self._gap_seconds, self._gap_tokens * self._num_gaps)
            self.tokens_per_message.observe_many(self._gap_tokens, self._num_gaps)
            self._num_gaps = 0


def _above(histogram: Histogram, series: Series, limit: float) -> tuple[int, int]:
    """Return how many values a histogram has, and how many above a limit, which is one of its buckets' bounds."""
    counts, _ = histogram.read()
    return counts[-1], counts[-1] - counts[series.buckets.index(limit)]
