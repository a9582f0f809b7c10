"""The metrics of a router; `series.py` describes each of them.

Per-message counts are plain integers; per-frame values are recorded once for all messages of a frame.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from lorrery.router import series
from lorrery.router.engine_metrics import EdgeEngine
from lorrery.router.series import OUTCOMES
from lorrery.service.faults.kinds import REQUEST_KINDS
from lorrery.service.settings.sections import MetricsSettings
from lorrery.service.telemetry.series import Exporter, Histogram, Sample, Series
from lorrery.service.telemetry.top_names import TopNames

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
        self.ttft = Histogram(series.ADAPTER_TTFT.buckets)

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
        shown = self._shown = Exporter(registry, series.TABLE)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.messages = 0
        self.dropped_tokens = 0
        shown.value(series.PROMPT_TOKENS, lambda: self.prompt_tokens)
        shown.value(series.OUTPUT_TOKENS, lambda: self.output_tokens)
        shown.value(series.MESSAGES, lambda: self.messages)
        shown.value(series.DROPPED_TOKENS, lambda: self.dropped_tokens)
        self.prompt_length = shown.histogram(series.PROMPT_LENGTH)
        self.output_length = shown.histogram(series.OUTPUT_LENGTH)
        self.ttft = shown.histogram(series.TTFT)
        self.tpot = shown.histogram(series.TPOT)
        self.itl = shown.histogram(series.ITL)
        self.e2e = shown.histogram(series.E2E)
        self.admission = shown.histogram(series.ADMISSION)
        self.stream_out = shown.histogram(series.STREAM_OUT)
        self.tokens_per_message = shown.histogram(series.TOKENS_PER_MESSAGE)
        self.lag = shown.histogram(series.LAG)
        self._gap_seconds, self._gap_tokens, self._num_gaps = 0.0, 0, 0
        self._requests = shown.numbers(series.REQUESTS, *OUTCOMES)
        self.resumed = shown.number(series.RESUMED)
        self.slow_readers = shown.number(series.SLOW_READERS)
        self.faults = shown.numbers(series.FAULTS, *sorted(REQUEST_KINDS))
        self._connected = shown.numbers(series.SHARD_CONNECTED)
        self.adapters = TopNames(limits.max_adapters, Traffic, "base")
        self.tenants = TopNames(limits.max_tenants, Traffic, "none")
        self._show(self.adapters, series.ADAPTER_REQUESTS, series.ADAPTER_PROMPT_TOKENS)
        self._show_more(self.adapters, series.ADAPTER_OUTPUT_TOKENS, series.ADAPTER_TTFT)
        self._show(self.tenants, series.TENANT_REQUESTS, series.TENANT_PROMPT_TOKENS)
        self._show_more(self.tenants, series.TENANT_OUTPUT_TOKENS, series.TENANT_TTFT)

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

    def watch(
        self,
        *,
        open_handlers: Callable[[], float],
        in_flight: Callable[[], float],
        waiting: Callable[[], float],
    ) -> None:
        """Set the sources of the gauges."""
        self._shown.value(series.OPEN_HANDLERS, open_handlers)
        self._shown.value(series.IN_FLIGHT, in_flight)
        self._shown.value(series.WAITING, waiting)

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
