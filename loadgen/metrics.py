"""Metrics of the load generator; `series.py` has their meaning."""

from prometheus_client import CollectorRegistry

from lorrery.loadgen import series
from lorrery.loadgen.workload.outcome import RequestOutcome
from lorrery.service.telemetry.series import Exporter

__all__ = ["LoadMetrics"]


class LoadMetrics:
    """`lorrery_loadgen_*` in the given registry; warm-up requests are counted like others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        shown = Exporter(registry, series.TABLE)
        self._in_flight = shown.number(series.IN_FLIGHT)
        self._sent = shown.number(series.SENT)
        self._outcomes = shown.numbers(series.OUTCOMES)
        self._prompt_tokens = shown.number(series.PROMPT_TOKENS)
        self._output_tokens = shown.number(series.OUTPUT_TOKENS)
        self._send_delay = shown.histogram(series.SEND_DELAY)
        self._ttft = shown.histogram(series.TTFT)
        self._tpot = shown.histogram(series.TPOT)
        self._e2e = shown.histogram(series.E2E)

    def request_sent(self, prompt_tokens: int, send_delay_seconds: float) -> None:
        """Count a sent request."""
        self._sent.inc()
        self._in_flight.inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._send_delay.observe(send_delay_seconds)

    def tokens_received(self, num_tokens: int) -> None:
        """Count tokens of one message."""
        self._output_tokens.inc(num_tokens)

    def request_ended(self, outcome: RequestOutcome, *, completed: bool) -> None:
        """Count a request that ended; only a completed one has latencies."""
        self._in_flight.inc(-1)
        self._outcomes.labels(outcome.status).inc()
        first, last = outcome.first_token_seconds, outcome.last_token_seconds
        if not completed or first is None or last is None:
            return
        self._ttft.observe(first - outcome.intended_seconds)
        self._e2e.observe(last - outcome.intended_seconds)
        if outcome.output_tokens > 1:
            self._tpot.observe((last - first) / (outcome.output_tokens - 1))
