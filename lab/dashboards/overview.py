"""Overview: how much comes in, how well it is served, what fails."""

from lab.dashboards.board import Board, Row
from lab.dashboards.panels import (
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
    "As seen by the router's clients, device seconds. Percentiles are interpolated within buckets, the mean is exact. "
)

BOARD = Board(
    "overview",
    "Overview",
    "How much traffic arrives, how well is it served, and what fails? Start here; the links above lead to the causes.",
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
                    " Calls that are cancelled, invalid or over quota do not count. Above 1 % the objective is missed.",
                    ratio(rate(REQUESTS, match=FAILED), rate(REQUESTS)),
                    RATIO,
                    {"orange": 0.005, "red": 0.01},
                ),
                number(
                    "TTFT p99",
                    "Time to first token, device seconds. Above 2.5 s for more requests than the objective allows.",
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
                    "Alerts of the rules; pending becomes firing after a while. docs/monitoring.md says what to do.",
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
                    "Calls that end, per wall second. Look for any outcome other than ok; docs/failures.md explains"
                    " each.",
                    [Query(rate(REQUESTS, "outcome"), "{{outcome}}")],
                    REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Tokens/s",
                    "Prompt tokens of completed requests, output tokens as they are written, and tokens for requests"
                    " that have already ended. Look for output that stays level while requests grow: the workers are"
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
                    "Calls that have not returned, requests in flight at a shard, requests in the scheduler, requests"
                    " waiting for a shard. The first three coincide; look for a gap that persists.",
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
                    "Requests by prompt length. Look for a change in the workload before you look for one in the"
                    " cluster.",
                    "lorrery_router_prompt_length_tokens",
                    COUNT,
                ),
                heat(
                    "Output lengths",
                    "Requests by output length.",
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
                    "Per wall second: all completed requests, those with a first token within 2.5 s, those with at"
                    " most 0.1 s per output token. Look for the last two to fall below the first: more load, less"
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
                    " that stays above its budget: LorreryErrorBudgetBurn fires.",
                    [
                        Query("lorrery:slo_misses:ratio_rate5m", "{{slo}}"),
                        Query("lorrery:slo_budget:ratio", "{{slo}}, budget"),
                    ],
                    RATIO,
                    maximum=1,
                ),
                lines(
                    "Budget burned: how many times too fast",
                    "Misses divided by the budget, over an hour. 1 uses up the budget exactly; 14.4 is a page.",
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
                    OF_CLIENTS + "Look for p99 that diverges from p50: some wait.",
                    percentiles(TTFT),
                    SECONDS,
                ),
                lines("TPOT, percentiles", OF_CLIENTS + "Follows the batch size.", percentiles(TPOT), SECONDS),
                lines(
                    "E2E, percentiles",
                    OF_CLIENTS + "Last message - arrival, of completed requests.",
                    percentiles("lorrery_router_e2e_request_latency_seconds"),
                    SECONDS,
                ),
                heat(
                    "ITL",
                    "Tokens by the gap before them; a message's gap is divided among its tokens. Look for a second"
                    " band far above: decodes that wait for a prefill.",
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
                    "Every outcome except ok, as a share of all finished calls. Look for what rises first.",
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
                    "Per wall second: requests resubmitted after their shard was lost, sequences requeued after a"
                    " worker was lost, workers lost, streams cut because their reader was too slow. Clients see at"
                    " most a pause; normally all are 0.",
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
