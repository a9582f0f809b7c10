"""The metrics of the load generator. Latencies are device seconds, from the intended send time."""

from prometheus_client import CollectorRegistry

from lorrery.loadgen.workload.outcome import RequestOutcome
from lorrery.service.telemetry.series import Exporter, Series, table

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)

SENT = Series("lorrery_loadgen_sent_requests_total", "requests", "Requests sent.")
IN_FLIGHT = Series("lorrery_loadgen_in_flight_requests", "requests", "Requests that are open.")
OUTCOMES = Series(
    "lorrery_loadgen_outcomes_total",
    "requests",
    "Requests that ended, by gRPC status or reason.",
    ("status",),
    more="A label value appears at its first occurrence.",
)
PROMPT_TOKENS = Series("lorrery_loadgen_prompt_tokens_total", "tokens", "Prompt tokens sent.")
OUTPUT_TOKENS = Series("lorrery_loadgen_output_tokens_total", "tokens", "Output tokens received.")
SEND_DELAY = Series(
    "lorrery_loadgen_send_delay_seconds", "device seconds", "Actual minus intended send time.", buckets=_SECONDS
)
TTFT = Series(
    "lorrery_loadgen_ttft_seconds", "device seconds", "TTFT: first token - intended send time.", buckets=_SECONDS
)
TPOT = Series(
    "lorrery_loadgen_tpot_seconds",
    "device seconds",
    "TPOT: (last token - first token) / (output tokens - 1).",
    buckets=_TOKEN_SECONDS,
)
E2E = Series("lorrery_loadgen_e2e_seconds", "device seconds", "E2E: last token - intended send time.", buckets=_SECONDS)

TABLE = table(globals())


class LoadMetrics:
    """`lorrery_loadgen_*` in the given registry; warm-up requests are counted like others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        shown = Exporter(registry, TABLE)
        self._in_flight = shown.number(IN_FLIGHT)
        self._sent = shown.number(SENT)
        self._outcomes = shown.numbers(OUTCOMES)
        self._prompt_tokens = shown.number(PROMPT_TOKENS)
        self._output_tokens = shown.number(OUTPUT_TOKENS)
        self._send_delay = shown.histogram(SEND_DELAY)
        self._ttft = shown.histogram(TTFT)
        self._tpot = shown.histogram(TPOT)
        self._e2e = shown.histogram(E2E)

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
