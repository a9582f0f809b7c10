"""The load generator's metric series. Latencies are device seconds, from the intended send time."""

from lorrery.service.telemetry.series import Series, table

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
