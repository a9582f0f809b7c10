"""Tenants: who gets what, who waits, who is refused."""

from lab.dashboards.board import Board, Row
from lab.dashboards.panels import (
    COUNT,
    RATIO,
    REQUESTS_PER_SECOND,
    SECONDS,
    TOKENS_PER_SECOND,
    Query,
    lines,
    mean,
    number,
    quantile,
    rate,
    ratio,
)

TENANT = 'tenant=~"$tenant"'
REQUESTS = "lorrery_router_tenant_requests_total"
REFUSED = 'outcome=~"over_quota|overloaded"'
FAIRNESS = "lorrery_scheduler_tenant_fairness_ratio"
QUEUE = "lorrery_scheduler_tenant_queue_seconds"
NAMED = (
    "The tenants with the most traffic are shown by name, the rest as `other`, requests without a tenant as `none`. "
)

BOARD = Board(
    "tenants",
    "Tenants",
    "Which tenant gets what share, which waits, and whose quota is used up?",
    [
        Row(
            "Now",
            [
                number(
                    "Fairness",
                    "Jain's index of the tokens served to each tenant in the last one to two minutes of device time: 1"
                    " if all got the same, 1 / n if one of n got all. It does not consider demand: check who waits as"
                    " well.",
                    f"min({FAIRNESS})",
                    RATIO,
                    {"orange": 0.5, "green": 0.8},
                ),
                number(
                    "Tenants active",
                    "With a request that ended within the window.",
                    f"count({rate(REQUESTS, 'tenant', TENANT)} > 0)",
                    COUNT,
                ),
                number(
                    "Refused",
                    "Share of the tenants' requests refused because of a quota or a full queue.",
                    ratio(rate(REQUESTS, match=f"{REFUSED}, {TENANT}"), rate(REQUESTS, match=TENANT)),
                    RATIO,
                    {"orange": 0.01, "red": 0.1},
                ),
                number(
                    "Held",
                    "Requests held back by the concurrency limit of their key (max_running).",
                    "sum(lorrery_scheduler_held_requests)",
                    COUNT,
                ),
                number(
                    "Longest mean wait",
                    "For the tenant that waits longest: from arrival to first admission, device seconds, over five"
                    " minutes.",
                    f"max(lorrery:tenant_queue_seconds:mean5m{{{TENANT}}})",
                    SECONDS,
                    {"orange": 1, "red": 5},
                ),
                number(
                    "Waiting",
                    "Requests of these tenants waiting now.",
                    f"sum(lorrery_scheduler_tenant_waiting_requests{{{TENANT}}})",
                    COUNT,
                ),
            ],
        ),
        Row(
            "Who gets what",
            [
                lines(
                    "Share of service",
                    NAMED + "Tokens served, prompt and output, as counted for fairness. Look for a share above the"
                    " tenant's weight while others wait.",
                    [Query(rate("lorrery_scheduler_tenant_service_tokens_total", "tenant", TENANT), "{{tenant}}")],
                    TOKENS_PER_SECOND,
                    shares=True,
                    link="tenant",
                ),
                lines(
                    "Output tokens/s",
                    NAMED + "Per wall second.",
                    [Query(rate("lorrery_router_tenant_output_tokens_total", "tenant", TENANT), "{{tenant}}")],
                    TOKENS_PER_SECOND,
                    link="tenant",
                ),
                lines(
                    "Fairness over time",
                    "As above. Look for a drop when one tenant's load rises: under a fair policy the others' service"
                    " is unaffected.",
                    [Query(f"min({FAIRNESS})", "Jain's index")],
                    RATIO,
                    maximum=1,
                ),
                lines(
                    "Requests/s",
                    NAMED + "Calls that end, per wall second.",
                    [Query(rate(REQUESTS, "tenant", TENANT), "{{tenant}}")],
                    REQUESTS_PER_SECOND,
                    stacked=True,
                    width=12,
                    link="tenant",
                ),
                lines(
                    "Service by kind",
                    "Prompt and output tokens of each tenant, per wall second. Look for tenants that send prompts and"
                    " get little output.",
                    [
                        Query(
                            rate("lorrery_scheduler_tenant_service_tokens_total", "tenant, kind", TENANT),
                            "{{tenant}} {{kind}}",
                        )
                    ],
                    TOKENS_PER_SECOND,
                    width=12,
                    link="tenant",
                ),
            ],
        ),
        Row(
            "Who waits",
            [
                lines(
                    "Waiting",
                    NAMED + "Requests waiting now, for any reason. Look for one tenant's queue that fills the whole"
                    " cluster's.",
                    [Query(f"sum by (tenant) (lorrery_scheduler_tenant_waiting_requests{{{TENANT}}})", "{{tenant}}")],
                    COUNT,
                    stacked=True,
                    link="tenant",
                ),
                lines(
                    "Running",
                    NAMED + "Requests in a batch now.",
                    [Query(f"sum by (tenant) (lorrery_scheduler_tenant_running_requests{{{TENANT}}})", "{{tenant}}")],
                    COUNT,
                    stacked=True,
                    link="tenant",
                ),
                lines(
                    "Queue time, mean",
                    NAMED
                    + "From arrival at the scheduler to first admission, device seconds. Look for one that waits five"
                    " times as long as the others.",
                    [Query(mean(QUEUE, "tenant", TENANT), "{{tenant}}")],
                    SECONDS,
                    link="tenant",
                ),
                lines(
                    "Queue time, p99",
                    NAMED + "Device seconds.",
                    [Query(quantile(0.99, QUEUE, "tenant", TENANT), "{{tenant}}")],
                    SECONDS,
                    width=12,
                    link="tenant",
                ),
                lines(
                    "TTFT, p90",
                    NAMED + "As seen by its clients, device seconds.",
                    [
                        Query(
                            quantile(0.9, "lorrery_router_tenant_time_to_first_token_seconds", "tenant", TENANT),
                            "{{tenant}}",
                        )
                    ],
                    SECONDS,
                    width=12,
                    link="tenant",
                ),
            ],
        ),
        Row(
            "Quotas",
            [
                lines(
                    "Refused by tenant",
                    NAMED
                    + "Per wall second; over_quota: its keys' requests_per_minute, tokens_per_minute or max_waiting;"
                    " overloaded: the queue of the cluster, or of one tenant in it, is full.",
                    [Query(rate(REQUESTS, "tenant, outcome", f"{REFUSED}, {TENANT}"), "{{tenant}} {{outcome}}")],
                    REQUESTS_PER_SECOND,
                    stacked=True,
                    link="tenant",
                ),
                lines(
                    "Share refused",
                    NAMED + "Over five minutes; above 10 % LorreryTenantRefused fires.",
                    [Query(f"lorrery:tenant_refused:ratio_rate5m{{{TENANT}}}", "{{tenant}}")],
                    RATIO,
                    {"red": 0.1},
                    maximum=1,
                    link="tenant",
                ),
                lines(
                    "Held requests",
                    "Over all keys: requests held back by the concurrency limit of their key (max_running). They are"
                    " not in any worker's queue.",
                    [Query("sum(lorrery_scheduler_held_requests)", "held")],
                    COUNT,
                ),
            ],
        ),
    ],
    ("tenant",),
)
