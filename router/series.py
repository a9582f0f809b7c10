"""The metric series of a router. TTFT and E2E count from the arrival at the router."""

from lorrery.service.telemetry.series import Series, table

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
