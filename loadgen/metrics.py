"""What the load generator shows to Prometheus. Latencies are device seconds, from the intended send time."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lorrery.loadgen.workload.outcome import RequestOutcome

__all__ = ["LoadMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)


class LoadMetrics:
    """`lorrery_loadgen_*` in the given registry; warm-up requests are counted like others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._in_flight = Gauge("lorrery_loadgen_in_flight_requests", "Requests that are open.", registry=registry)
        self._sent = Counter("lorrery_loadgen_sent_requests_total", "Requests sent.", registry=registry)
        self._outcomes = Counter(
            "lorrery_loadgen_outcomes_total", "Requests that ended, by status.", ["status"], registry=registry
        )
        self._prompt_tokens = Counter("lorrery_loadgen_prompt_tokens_total", "Prompt tokens sent.", registry=registry)
        self._output_tokens = Counter(
            "lorrery_loadgen_output_tokens_total", "Output tokens received.", registry=registry
        )
        self._send_delay = Histogram(
            "lorrery_loadgen_send_delay_seconds",
            "Sent - intended send time, device seconds.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._ttft = Histogram(
            "lorrery_loadgen_ttft_seconds",
            "First token - intended send time, device seconds.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._tpot = Histogram(
            "lorrery_loadgen_tpot_seconds",
            "(Last token - first token) / (output tokens - 1), device seconds.",
            registry=registry,
            buckets=_TOKEN_SECONDS,
        )
        self._e2e = Histogram(
            "lorrery_loadgen_e2e_seconds",
            "Last token - intended send time, device seconds.",
            registry=registry,
            buckets=_SECONDS,
        )

    def request_sent(self, prompt_tokens: int, send_delay_seconds: float) -> None:
        """Count a request that goes out."""
        self._sent.inc()
        self._in_flight.inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._send_delay.observe(send_delay_seconds)

    def tokens_received(self, num_tokens: int) -> None:
        """Count tokens of one message."""
        self._output_tokens.inc(num_tokens)

    def request_ended(self, outcome: RequestOutcome, *, completed: bool) -> None:
        """Count a request that ended; only a completed one has latencies."""
        self._in_flight.dec()
        self._outcomes.labels(outcome.status).inc()
        first, last = outcome.first_token_seconds, outcome.last_token_seconds
        if not completed or first is None or last is None:
            return
        self._ttft.observe(first - outcome.intended_seconds)
        self._e2e.observe(last - outcome.intended_seconds)
        if outcome.output_tokens > 1:
            self._tpot.observe((last - first) / (outcome.output_tokens - 1))
