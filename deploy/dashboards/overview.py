"""Overview: how much comes in, how well it is served, what fails."""

from deploy.dashboards.board import Board, Row
from deploy.dashboards.panels import (
    COUNT,
    PER_SECOND,
    RATIO,
    REQUESTS_PER_SECOND,
    SECONDS,
    TOKENS_PER_SECOND,
    Query,
    heat,
    lines,
    number,
    percentiles,
    quantile,
    rate,
    ratio,
    rows,
)

REQUESTS = "lorrery_router_requests_total"
TTFT = "lorrery_router_time_to_first_token_seconds"
TPOT = "lorrery_router_time_per_output_token_seconds"
FAILED = 'outcome!~"ok|cancelled|aborted|invalid|not_found|unauthenticated|denied|rank_over_limit|over_quota"'
"""Outcomes that are the cluster's fault: those of the objective `served` in the recording rules."""

NOT_OK = 'outcome!="ok"'

OF_CLIENTS = (
    "As the router's clients see it, device seconds. Percentiles are interpolated in buckets, the mean is exact. "
)

BOARD = Board(
    "overview",
    "Overview",
    "How much comes in, how well is it served, and what fails? Start here; the links above lead to the reasons.",
    [
        Row(
            "Now",
            [
                number(
                    "Workers ready",
                    "Attached workers that take new sequences. Look for fewer than you started.",
                    'sum(lorrery_scheduler_workers{state="ready"})',
                    COUNT,
                    {"red": 0, "green": 1},
                ),
                number(
                    "Requests/s",
                    "Generate calls that end, per wall second, whatever their outcome.",
                    rate(REQUESTS),
                    REQUESTS_PER_SECOND,
                ),
                number(
                    "Not served",
                    "Share of calls that the cluster failed: refused as overloaded, past their deadline, no worker."
                    " What clients cancel, get wrong or ask for beyond their quota does not count. Above 1 % the"
                    " objective is missed.",
                    ratio(rate(REQUESTS, match=FAILED), rate(REQUESTS)),
                    RATIO,
                    {"orange": 0.005, "red": 0.01},
                ),
                number(
                    "TTFT p99",
                    "Time to first token, device seconds. Above 2.5 s more than the objective allows.",
                    quantile(0.99, TTFT),
                    SECONDS,
                    {"orange": 1.0, "red": 2.5},
                ),
                number(
                    "Output tokens/s",
                    "Tokens written to clients, per wall second.",
                    rate("lorrery_router_output_tokens_total"),
                    TOKENS_PER_SECOND,
                ),
                number(
                    "Fullest KV pool",
                    "Share of the pool in use on the fullest worker. Look for requests that wait while it is near 100"
                    " %.",
                    "max(lorrery:worker_kv_used:ratio)",
                    RATIO,
                    {"orange": 0.8, "red": 0.95},
                ),
            ],
        ),
        Row(
            "Alerts",
            [
                rows(
                    "Alerts, pending and firing",
                    "What the rules find wrong now; pending becomes firing after a while. docs/alerts.md says what to"
                    " do.",
                    Query('ALERTS{alertname=~"Lorrery.+"}'),
                    {
                        "alertname": "alert",
                        "alertstate": "state",
                        "severity": "severity",
                        "slo": "objective",
                        "window": "window",
                        "worker": "worker",
                        "tenant": "tenant",
                        "instance": "instance",
                    },
                    width=24,
                    height=5,
                )
            ],
        ),
        Row(
            "Traffic",
            [
                lines(
                    "Requests by outcome",
                    "Calls that end, per wall second. Look for any outcome beside ok; docs/errors.md says what each"
                    " means.",
                    [Query(rate(REQUESTS, "outcome"), "{{outcome}}")],
                    REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Tokens/s",
                    "Prompt tokens of requests that ended well, output tokens as they are written, and tokens that"
                    " nobody waits for any more. Look for output that stays level while requests grow: the workers are"
                    " full.",
                    [
                        Query(rate("lorrery_router_prompt_tokens_total"), "prompt"),
                        Query(rate("lorrery_router_output_tokens_total"), "output"),
                        Query(rate("lorrery_router_dropped_tokens_total"), "dropped"),
                    ],
                    TOKENS_PER_SECOND,
                ),
                lines(
                    "In flight",
                    "Calls that have not returned, what a shard works on, what the scheduler knows, what waits for a"
                    " shard. The first three lie on one another; look for a gap that stays.",
                    [
                        Query("sum(lorrery_router_open_handlers)", "open calls"),
                        Query("sum(lorrery_router_in_flight_requests)", "in flight, router"),
                        Query("sum(lorrery_scheduler_in_flight_requests)", "in flight, scheduler"),
                        Query("sum(lorrery_router_waiting_for_shard_requests)", "waiting for a shard"),
                    ],
                    COUNT,
                ),
                heat(
                    "Prompt lengths",
                    "Requests by the tokens of their prompts. Look for a change of what is asked for before you look"
                    " for one in the cluster.",
                    "lorrery_router_prompt_length_tokens",
                    COUNT,
                ),
                heat(
                    "Output lengths",
                    "Requests by the tokens of their outputs.",
                    "lorrery_router_output_length_tokens",
                    COUNT,
                ),
            ],
        ),
        Row(
            "Goodput",
            [
                lines(
                    "Requests within the objectives",
                    "Per wall second: all that ended well, those whose first token came within 2.5 s, those with at"
                    " most 0.1 s per output token. Look for the last two to fall away from the first: more load, less"
                    " goodput.",
                    [
                        Query(rate(REQUESTS, match='outcome="ok"'), "ended well"),
                        Query(rate(f"{TTFT}_bucket", match='le="2.5"'), "TTFT <= 2.5 s"),
                        Query(rate(f"{TPOT}_bucket", match='le="0.1"'), "TPOT <= 0.1 s"),
                    ],
                    REQUESTS_PER_SECOND,
                ),
                lines(
                    "Objectives missed",
                    "Share of requests that miss each objective, over five minutes, and its budget. Look for a line"
                    " that stays above its budget: LorreryErrorBudgetBurn tells of it.",
                    [
                        Query("lorrery:slo_misses:ratio_rate5m", "{{slo}}"),
                        Query("lorrery:slo_budget:ratio", "{{slo}}, budget"),
                    ],
                    RATIO,
                    maximum=1,
                ),
                lines(
                    "Budget burned: how many times too fast",
                    "Misses over the budget, over an hour. 1 uses the budget up exactly; 14.4 is a page.",
                    [Query("lorrery:slo_misses:ratio_rate1h / on (slo) lorrery:slo_budget:ratio", "{{slo}}")],
                    COUNT,
                    {"orange": 1, "red": 14.4},
                ),
            ],
        ),
        Row(
            "Latency",
            [
                heat(
                    "TTFT",
                    "Requests by their time to first token, device seconds. Look for a second band above the"
                    " first (queueing, adapter loads) and for one that climbs.",
                    TTFT,
                    SECONDS,
                ),
                heat(
                    "TPOT",
                    "Requests by their time per output token, (E2E - TTFT) / (output tokens - 1), device seconds."
                    " Look for a band that widens: batches grow, or prefills come between.",
                    TPOT,
                    SECONDS,
                ),
                lines(
                    "TTFT, percentiles",
                    OF_CLIENTS + "Look for p99 that leaves p50: some wait.",
                    percentiles(TTFT),
                    SECONDS,
                ),
                lines("TPOT, percentiles", OF_CLIENTS + "Follows the batch size.", percentiles(TPOT), SECONDS),
                lines(
                    "E2E, percentiles",
                    OF_CLIENTS + "Last message - arrival, of requests that ended well.",
                    percentiles("lorrery_router_e2e_request_latency_seconds"),
                    SECONDS,
                ),
                heat(
                    "ITL",
                    "Tokens by the gap before them; a message's gap is shared by its tokens. Look for a far second"
                    " band: decodes that wait for a prefill.",
                    "lorrery_router_inter_token_latency_seconds",
                    SECONDS,
                ),
                lines(
                    "ITL, percentiles",
                    OF_CLIENTS + "Gap between two tokens of a stream.",
                    percentiles("lorrery_router_inter_token_latency_seconds"),
                    SECONDS,
                    width=12,
                ),
            ],
        ),
        Row(
            "Errors",
            [
                lines(
                    "Share of requests by what failed",
                    "Every outcome but ok, as a share of all that ended. Look for what rises first.",
                    [
                        Query(
                            f"{rate(REQUESTS, 'outcome', NOT_OK)} / on () group_left () {rate(REQUESTS)}",
                            "{{outcome}}",
                        )
                    ],
                    RATIO,
                    width=12,
                    stacked=True,
                ),
                lines(
                    "Failures survived",
                    "Per wall second: requests resubmitted after their shard was lost, sequences queued again after a"
                    " worker was, workers lost, streams cut since their reader was too slow. Clients see a pause at"
                    " most; all 0 on a good day.",
                    [
                        Query(rate("lorrery_router_resumed_total"), "resumed"),
                        Query(rate("lorrery_scheduler_requeued_sequences_total"), "queued again"),
                        Query(rate("lorrery_scheduler_workers_lost_total"), "workers lost"),
                        Query(rate("lorrery_router_slow_readers_total"), "slow readers"),
                    ],
                    PER_SECOND,
                    width=12,
                ),
            ],
        ),
    ],
)
