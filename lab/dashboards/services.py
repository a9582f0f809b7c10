"""Services: the processes themselves; CPU, memory, the calls' status codes, how tokens leave."""

from lab.dashboards.board import Board, Row
from lab.dashboards.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    RATE,
    RATIO,
    REQUESTS_PER_SECOND,
    SECONDS,
    Query,
    lines,
    mean,
    percentiles,
    quantile,
    rate,
    rows,
)

SERVICE = 'job=~"router|scheduler|worker"'
REQUESTS = "lorrery_router_requests_total"
PER_MESSAGE = "lorrery_router_tokens_per_message_tokens"

GRPC_CODES = {
    "OK": "ok",
    "CANCELLED": "cancelled|aborted",
    "INVALID_ARGUMENT": "invalid",
    "DEADLINE_EXCEEDED": "deadline",
    "NOT_FOUND": "not_found",
    "RESOURCE_EXHAUSTED": "overloaded|over_quota|unattainable",
    "FAILED_PRECONDITION": "rank_over_limit",
    "UNAUTHENTICATED": "unauthenticated",
    "PERMISSION_DENIED": "denied",
    "UNAVAILABLE": "unavailable",
    "INTERNAL": "failed",
    "as the fault said": "fault",
}
"Status with which a call ends, and its outcomes."

BOARD = Board(
    "services",
    "Services",
    "How are the processes: CPU, memory, status codes of the calls, and are tokens sent promptly?",
    [
        Row(
            "Processes",
            [
                rows(
                    "Version and state",
                    "One line for each process that Prometheus reaches.",
                    Query('lorrery_build_info{service=~".+"}'),
                    {"service": "service", "instance": "instance", "version": "version"},
                    width=8,
                    height=8,
                ),
                lines(
                    "CPU",
                    "Cores used, user and system. A router or scheduler is one Python process: near 1 it is saturated,"
                    " and latency rises with any further load.",
                    [Query(f"rate(process_cpu_seconds_total{{{SERVICE}}}[{RATE}])", "{{job}} {{instance}}")],
                    COUNT,
                    {"orange": 0.7, "red": 0.9},
                ),
                lines(
                    "Memory",
                    "Resident memory. Look for one that only grows: open streams, long queues, large batches.",
                    [Query(f"process_resident_memory_bytes{{{SERVICE}}}", "{{job}} {{instance}}")],
                    BYTES,
                ),
                lines(
                    "Open files, share of the limit",
                    "Connections are files. Look for a router near 1: it refuses connections there.",
                    [Query(f"process_open_fds{{{SERVICE}}} / process_max_fds{{{SERVICE}}}", "{{job}} {{instance}}")],
                    RATIO,
                    {"orange": 0.7, "red": 0.9},
                ),
                lines(
                    "Answering Prometheus",
                    "1: it responds. Look for a 0: exited, hanging, or unreachable from Prometheus.",
                    [Query(f"up{{{SERVICE}}}", "{{job}} {{instance}}")],
                    COUNT,
                    maximum=1,
                ),
                lines(
                    "Starts",
                    "Starts of each process within 15 minutes, by its start time. Above 0 long after your own start: a"
                    " process keeps dying.",
                    [Query(f"changes(process_start_time_seconds{{{SERVICE}}}[15m])", "{{job}} {{instance}}")],
                    COUNT,
                ),
            ],
        ),
        Row(
            "Calls",
            [
                lines(
                    "gRPC codes",
                    "Generate calls by final status, per wall second; over HTTP the same outcomes have HTTP's codes"
                    " (docs/failures.md). Look for RESOURCE_EXHAUSTED (load, quotas), UNAVAILABLE (no worker), INTERNAL"
                    " (a bug).",
                    [
                        Query(rate(REQUESTS, match=f'outcome=~"{outcomes}"'), code)
                        for code, outcomes in GRPC_CODES.items()
                    ],
                    REQUESTS_PER_SECOND,
                    width=12,
                    stacked=True,
                ),
                lines(
                    "Streams between the services",
                    "Open Route streams, as counted by routers and by schedulers, and attached workers. Look for a"
                    " router that has lost its shard.",
                    [
                        Query("sum(lorrery_router_shard_connected)", "shards connected, routers"),
                        Query("sum(lorrery_scheduler_routers)", "routers connected, schedulers"),
                        Query("sum(lorrery_scheduler_workers)", "workers attached"),
                    ],
                    COUNT,
                    width=12,
                ),
            ],
        ),
        Row(
            "How tokens leave",
            [
                lines(
                    "Coalescing: tokens per message",
                    "1 while the router keeps up; above 1 it coalesces tokens of one stream. Look for a mean above"
                    " 1.2: it is short of CPU.",
                    [
                        Query(mean(PER_MESSAGE), "mean"),
                        Query(quantile(0.99, PER_MESSAGE), "p99"),
                    ],
                    COUNT,
                    {"orange": 1.2, "red": 4},
                ),
                lines(
                    "Messages/s and tokens/s",
                    "Written to clients, per wall second. The further apart the two, the more is coalesced.",
                    [
                        Query(rate("lorrery_router_messages_total"), "messages"),
                        Query(rate("lorrery_router_output_tokens_total"), "tokens"),
                    ],
                    PER_SECOND,
                ),
                lines(
                    "Router: lag of its event loop",
                    "How long a frame of tokens waited for the event loop, wall seconds. Above 0.1 s (p99)"
                    " LorreryRouterLags fires.",
                    percentiles("lorrery_router_lag_wall_seconds"),
                    SECONDS,
                    {"red": 0.1},
                ),
                lines(
                    "Router: admission",
                    "From a request's arrival until it is sent to a shard, wall seconds: tokenizer, checks, keys. Look"
                    " for long text prompts.",
                    percentiles("lorrery_router_admission_wall_seconds"),
                    SECONDS,
                ),
                lines(
                    "Router: stream out",
                    "From a frame's arrival at the router until it is written, wall seconds. Look for p99 above a"
                    " step: slow readers, or a saturated router.",
                    percentiles("lorrery_router_stream_out_wall_seconds"),
                    SECONDS,
                ),
                lines(
                    "Slow readers and dropped tokens",
                    "Per wall second: streams cut because their reader was too slow, tokens for requests that had"
                    " already ended.",
                    [
                        Query(rate("lorrery_router_slow_readers_total"), "slow readers"),
                        Query(rate("lorrery_router_dropped_tokens_total"), "dropped tokens"),
                    ],
                    PER_SECOND,
                ),
            ],
        ),
        Row(
            "Load generator (while one runs)",
            [
                lines(
                    "Sent and open requests",
                    "Requests sent per wall second, and open now. Look for a growing number of open requests: more are"
                    " sent than served.",
                    [
                        Query(rate("lorrery_loadgen_sent_requests_total"), "sent/s"),
                        Query("sum(lorrery_loadgen_in_flight_requests)", "open"),
                    ],
                    COUNT,
                ),
                lines(
                    "Send delay",
                    "Actual - intended send time, device seconds. Look for p99 beyond a few milliseconds: the load"
                    " generator itself is short of CPU, which distorts its figures.",
                    percentiles("lorrery_loadgen_send_delay_seconds"),
                    SECONDS,
                    {"orange": 0.01, "red": 0.1},
                ),
                lines(
                    "TTFT at the client and at the router",
                    "p90, device seconds. The client measures from the intended send time; the difference is its own"
                    " delay and the network.",
                    [
                        Query(quantile(0.9, "lorrery_loadgen_ttft_seconds"), "client"),
                        Query(quantile(0.9, "lorrery_router_time_to_first_token_seconds"), "router"),
                    ],
                    SECONDS,
                ),
            ],
        ),
    ],
)
