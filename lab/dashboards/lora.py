"""LoRA: which adapters are where, what loading them costs, whether they fit."""

from lab.dashboards.board import Board, Row
from lab.dashboards.panels import (
    COUNT,
    PER_SECOND,
    RATIO,
    REQUESTS_PER_SECOND,
    SECONDS,
    TOKENS_PER_SECOND,
    Query,
    cells,
    leaders,
    lines,
    mean,
    number,
    quantile,
    rate,
    ratio,
)

ADAPTER = 'adapter=~"$adapter"'
WORKER = 'worker=~"$worker"'
LOADS = "lorrery_scheduler_adapter_loads_total"
THRASH = "lorrery_scheduler_adapter_thrash_total"
TTFT = "lorrery_router_adapter_time_to_first_token_seconds"
RESIDENT = "lorrery_scheduler_worker_adapter_resident"
NAMED = "The adapters with the most traffic are shown by name, the rest as `other`. "

BOARD = Board(
    "lora",
    "LoRA",
    "Which adapters are on which GPU, what does loading them cost, and do the adapters in use fit?",
    [
        Row(
            "Now",
            [
                number(
                    "Adapters on GPUs",
                    "Summed over the workers: an adapter on two GPUs counts twice.",
                    f"sum(lorrery_scheduler_worker_resident_adapters{{{WORKER}}})",
                    COUNT,
                ),
                number(
                    "Loads/s",
                    "Finished loads per wall second, whatever their outcome.",
                    rate(LOADS),
                    PER_SECOND,
                ),
                number(
                    "Thrash",
                    "Share of loads that reload an adapter within a minute of device time after its eviction. Above 30"
                    " % more adapters are in use than fit.",
                    ratio(rate(THRASH), rate(LOADS)),
                    RATIO,
                    {"orange": 0.1, "red": 0.3},
                ),
                number(
                    "Failed loads",
                    "Share of loads that fail. Look for anything above 0: requests for these adapters fail too.",
                    ratio(rate(LOADS, match='outcome="failed"'), rate(LOADS)),
                    RATIO,
                    {"red": 0.001},
                ),
                number(
                    "Wait for adapters",
                    "Mean time that a request waits because its adapter is not yet on the GPU, device seconds.",
                    mean("lorrery_scheduler_request_phase_seconds", match='phase="adapter_load"'),
                    SECONDS,
                    {"orange": 0.1, "red": 0.5},
                ),
                number(
                    "LoRA's share of step time",
                    "Share of the modelled step time taken by the adapters' own matrices.",
                    ratio(
                        rate("lorrery_worker_step_part_seconds_total", match=f'kind="lora", {WORKER}'),
                        rate("lorrery_worker_step_modelled_seconds_sum", match=WORKER),
                    ),
                    RATIO,
                ),
            ],
        ),
        Row(
            "Residency",
            [
                cells(
                    "Residency: on how many GPUs each adapter is",
                    NAMED + "One row per adapter, coloured by the number of workers that have it; white: none. Look for"
                    " rows that flicker (thrash), and for popular adapters on few workers.",
                    Query(
                        f'sum by (adapter) ({RESIDENT}{{level="gpu", {ADAPTER}, {WORKER}, adapter!="other"}})',
                        "{{adapter}}",
                    ),
                    COUNT,
                    {"light-blue": 1, "semi-dark-blue": 2, "dark-blue": 4},
                ),
                lines(
                    "Adapters by worker and level",
                    "Adapters on the GPU and in host memory, `other` included. Look for a GPU at its max_loras.",
                    [Query(f"sum by (worker, level) ({RESIDENT}{{{WORKER}}})", "{{worker}} {{level}}")],
                    COUNT,
                    width=12,
                    link="worker",
                ),
                lines(
                    "Running sequences that pin an adapter",
                    "A pinned adapter cannot be evicted. Look for as many pins as places: no other adapter can be"
                    " loaded.",
                    [
                        Query("sum(lorrery_scheduler_adapter_pins)", "pins"),
                        Query(f"sum(lorrery_scheduler_worker_resident_adapters{{{WORKER}}})", "on GPUs"),
                    ],
                    COUNT,
                    width=12,
                ),
            ],
        ),
        Row(
            "Loads and evictions",
            [
                lines(
                    "Loads by tier and outcome",
                    "Per wall second; a load from host memory takes milliseconds, from disk ten times as long. Look"
                    " for disk loads that continue after startup (max_cpu_loras), and for failed loads.",
                    [Query(rate(LOADS, "tier, outcome"), "{{tier}} {{outcome}}")],
                    PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Time of a load",
                    "Device seconds, by tier. Look for p99 far above p50: loads queue for the link"
                    " (max_concurrent_loads).",
                    [
                        Query(
                            quantile(q, "lorrery_scheduler_adapter_load_seconds", "tier"), f"{{{{tier}}}} p{q * 100:g}"
                        )
                        for q in (0.5, 0.99)
                    ],
                    SECONDS,
                ),
                lines(
                    "Evictions by level",
                    "Per wall second, from GPU and host memory. As many evictions as loads: all places are taken.",
                    [Query(rate("lorrery_scheduler_adapter_evictions_total", "level"), "{{level}}")],
                    PER_SECOND,
                ),
                lines(
                    "Thrash by adapter",
                    NAMED
                    + "Loads per wall second of adapters evicted within the minute before. Look for a few adapters"
                    " that take turns.",
                    leaders(rate(THRASH, "adapter", ADAPTER), "adapter"),
                    PER_SECOND,
                    link="adapter",
                    stacked=True,
                ),
                lines(
                    "Loads by adapter",
                    NAMED + "Per wall second.",
                    leaders(rate("lorrery_scheduler_loads_by_adapter_total", "adapter", ADAPTER), "adapter"),
                    PER_SECOND,
                    link="adapter",
                    stacked=True,
                ),
                lines(
                    "Thrash, share of loads",
                    "Over five minutes; above 30 % LorreryAdapterThrash fires.",
                    [Query("lorrery:adapter_thrash:ratio_rate5m", "thrash")],
                    RATIO,
                    {"red": 0.3},
                    maximum=1,
                ),
            ],
        ),
        Row(
            "By adapter",
            [
                lines(
                    "Requests/s by adapter",
                    NAMED + "`base` is the model without an adapter. Look for how skewed popularity is: a few popular"
                    " adapters fit, many equally popular ones do not.",
                    leaders(rate("lorrery_router_adapter_requests_total", "adapter", ADAPTER), "adapter"),
                    REQUESTS_PER_SECOND,
                    stacked=True,
                    link="adapter",
                ),
                lines(
                    "Output tokens/s by adapter",
                    NAMED + "Per wall second.",
                    leaders(rate("lorrery_router_adapter_output_tokens_total", "adapter", ADAPTER), "adapter"),
                    TOKENS_PER_SECOND,
                    stacked=True,
                    link="adapter",
                ),
                lines(
                    "Waiting by adapter",
                    NAMED
                    + "Requests waiting now. Look for one adapter whose requests wait while the others are served.",
                    leaders(f"sum by (adapter) (lorrery_scheduler_adapter_waiting_requests{{{ADAPTER}}})", "adapter"),
                    COUNT,
                    link="adapter",
                ),
                lines(
                    "Running by adapter",
                    NAMED
                    + "Requests in a batch now. A batch with many adapters costs more per step than one with few.",
                    leaders(f"sum by (adapter) (lorrery_scheduler_adapter_running_requests{{{ADAPTER}}})", "adapter"),
                    COUNT,
                    stacked=True,
                    link="adapter",
                ),
                lines(
                    "TTFT p90 by adapter",
                    NAMED + "Device seconds. Look for rare adapters far above popular ones: they are loaded for each"
                    " request.",
                    leaders(
                        quantile(0.9, TTFT, "adapter", ADAPTER),
                        "adapter",
                    ),
                    SECONDS,
                    link="adapter",
                ),
                lines(
                    "Queue time by adapter",
                    NAMED + "Mean from arrival at the scheduler to first admission, device seconds.",
                    leaders(mean("lorrery_scheduler_adapter_queue_seconds", "adapter", ADAPTER), "adapter"),
                    SECONDS,
                    link="adapter",
                ),
            ],
        ),
    ],
    ("worker", "adapter"),
)
