"""Workers: do they keep the modelled pace, and what do their steps spend their time on?"""

from lab.dashboards.board import Board, Row
from lab.dashboards.panels import (
    COUNT,
    PER_SECOND,
    RATIO,
    SECONDS,
    TOKENS_PER_SECOND,
    Query,
    heat,
    lines,
    mean,
    number,
    quantile,
    rate,
    ratio,
    rows,
    states,
)

WORKER = 'worker=~"$worker"'
MODELLED = "lorrery_worker_step_modelled_seconds"
ACTUAL = "lorrery_worker_step_actual_seconds"
STATE = "lorrery_worker_state"
STATES = {
    1: ("loading", "light-orange"),
    2: ("dialling", "orange"),
    3: ("attached", "green"),
    4: ("draining", "blue"),
}


def by_worker(part: str, whole: str) -> Query:
    """Return the quotient of two counters' rates for each worker."""
    return Query(ratio(rate(part, "worker", WORKER), rate(whole, "worker", WORKER)), "{{worker}}")


BOARD = Board(
    "workers",
    "Workers",
    "Do the workers keep the pace of the GPU that they model, where does step time go, and which workers were lost?",
    [
        Row(
            "Now",
            [
                number(
                    "Attached", "To a scheduler, draining included.", f"sum(lorrery_worker_attached{{{WORKER}}})", COUNT
                ),
                number(
                    "Behind pace",
                    "How much longer steps take than modelled, for the worker that is furthest behind. Above 2 %"
                    " latencies are no longer the modelled GPU's: run fewer workers on the machine, or raise"
                    " time_scale.",
                    f"max({by_worker(f'{ACTUAL}_sum', f'{MODELLED}_sum').expr} - 1)",
                    RATIO,
                    {"orange": 0.01, "red": 0.02},
                ),
                number(
                    "Lag p99",
                    "Wall seconds from the due end of a step until the worker woke up.",
                    quantile(0.99, "lorrery_worker_lag_seconds", match=WORKER),
                    SECONDS,
                    {"orange": 0.005, "red": 0.02},
                ),
                number(
                    "Busy",
                    "Modelled step time per wall second, mean over the workers; at time_scale 1 this is the GPU's busy"
                    " share, at 2 it is twice that share.",
                    f"avg({rate(f'{MODELLED}_sum', 'worker', WORKER)})",
                    RATIO,
                ),
                number(
                    "Output tokens/s",
                    "Made by these workers, per wall second.",
                    rate("lorrery_worker_output_tokens_total", match=WORKER),
                    TOKENS_PER_SECOND,
                ),
                number(
                    "Lost in an hour",
                    "Workers that disappeared without draining. Their requests are recomputed elsewhere.",
                    "sum(increase(lorrery_scheduler_workers_lost_total[1h]))",
                    COUNT,
                    {"orange": 1},
                ),
            ],
        ),
        Row(
            "Who they are",
            [
                states(
                    "State",
                    "Loading the weights, dialling the scheduler, attached to it, draining. Look for one that dials"
                    " for long: its log says why it is refused.",
                    Query(
                        " + ".join(
                            f'{value} * sum by (worker) ({STATE}{{state="{word}", {WORKER}}})'
                            for value, (word, _) in STATES.items()
                        ),
                        "{{worker}}",
                    ),
                    STATES,
                    width=12,
                ),
                rows(
                    "GPU and model",
                    "Static properties of each worker.",
                    Query(f"lorrery_worker_info{{{WORKER}}}"),
                    {
                        "worker": "worker",
                        "gpu": "GPU",
                        "model": "model",
                        "tensor_parallel": "tensor parallel",
                        "instance": "instance",
                    },
                    height=7,
                ),
            ],
        ),
        Row(
            "Pace",
            [
                lines(
                    "Step time, modelled and actual",
                    "Means, device seconds. Actual: measured between the ends of two steps. The two coincide; look for"
                    " actual above modelled.",
                    [
                        Query(mean(MODELLED, "worker", WORKER), "{{worker}} modelled"),
                        Query(mean(ACTUAL, "worker", WORKER), "{{worker}} actual"),
                    ],
                    SECONDS,
                    link="worker",
                ),
                lines(
                    "Behind pace",
                    "Actual over modelled step time, minus 1: 0 is perfect pace. Above 2 % LorreryBehindPace fires.",
                    [Query(by_worker(f"{ACTUAL}_sum", f"{MODELLED}_sum").expr + " - 1", "{{worker}}")],
                    RATIO,
                    {"orange": 0.01, "red": 0.02},
                    link="worker",
                ),
                lines(
                    "Lag",
                    "Wall seconds from the due end of a step until the worker woke up. Does not change"
                    " device time. Look for p99 of a whole step: the machine is short of CPU.",
                    [
                        Query(
                            quantile(q, "lorrery_worker_lag_seconds", "worker", WORKER), f"{{{{worker}}}} p{q * 100:g}"
                        )
                        for q in (0.5, 0.99)
                    ],
                    SECONDS,
                    link="worker",
                ),
                lines(
                    "Gaps",
                    "Device seconds per wall second in which a worker with work stood idle: it or its plan was late.",
                    [Query(rate("lorrery_worker_gap_seconds_total", "worker", WORKER), "{{worker}}")],
                    RATIO,
                    link="worker",
                ),
                heat(
                    "Step time",
                    "Steps by their modelled duration, device seconds. Look for two bands, decodes and prefills, and"
                    " for the distance between them: that is the gap that a stream sees.",
                    MODELLED,
                    SECONDS,
                    match=WORKER,
                    width=16,
                ),
            ],
        ),
        Row(
            "What a step is made of",
            [
                lines(
                    "Where step time goes",
                    "Share of the modelled step time: compute and memory (linear layers), attention, lora, all_reduce,"
                    " kernel (fixed costs), host (the CPU); docs/step-time.md says how each is computed. Look for"
                    " memory at small batches, compute in prefills, lora with many adapters in a batch.",
                    [Query(rate("lorrery_worker_step_part_seconds_total", "kind", WORKER), "{{kind}}")],
                    SECONDS,
                    width=12,
                    shares=True,
                ),
                lines(
                    "Use of the GPU while a batch runs",
                    "Share of the data sheet's FLOPS and memory bandwidth. Decodes use bandwidth, prefills FLOPS;"
                    " larger batches more of both.",
                    [
                        Query(
                            f"{rate('lorrery_worker_flops_total', 'worker', WORKER)}"
                            f" / {rate(f'{MODELLED}_sum', 'worker', WORKER)}"
                            f" / sum by (worker) (lorrery_worker_peak_flops_per_second{{{WORKER}}})",
                            "{{worker}} FLOPS",
                        ),
                        Query(
                            f"{rate('lorrery_worker_memory_bytes_total', 'worker', WORKER)}"
                            f" / {rate(f'{MODELLED}_sum', 'worker', WORKER)}"
                            f" / sum by (worker) (lorrery_worker_peak_memory_bytes_per_second{{{WORKER}}})",
                            "{{worker}} bandwidth",
                        ),
                    ],
                    RATIO,
                    width=12,
                    maximum=1,
                    link="worker",
                ),
                lines(
                    "Busy",
                    "Modelled step time per wall second, by worker: its GPU's busy share times time_scale. Look for"
                    " one at 100 % beside idle ones.",
                    [Query(rate(f"{MODELLED}_sum", "worker", WORKER), "{{worker}}")],
                    RATIO,
                    link="worker",
                ),
                lines(
                    "Sequences per step",
                    "Mean batch size of each worker.",
                    [Query(mean("lorrery_worker_batch_size", "worker", WORKER), "{{worker}}")],
                    COUNT,
                    link="worker",
                ),
                lines(
                    "Tokens/s by worker",
                    "Output tokens made and prompt tokens computed, per wall second.",
                    [
                        Query(rate("lorrery_worker_output_tokens_total", "worker", WORKER), "{{worker}} output"),
                        Query(rate("lorrery_worker_prefill_tokens_total", "worker", WORKER), "{{worker}} prefill"),
                    ],
                    TOKENS_PER_SECOND,
                    link="worker",
                ),
            ],
        ),
        Row(
            "Losses",
            [
                lines(
                    "Streams that the scheduler ended, by reason",
                    "In five minutes: silent (no heartbeat), stalled (no progress on a plan), error (an exception in a"
                    " decision), protocol (an invalid message), superseded (it reconnected), fault (injected).",
                    [Query("sum by (reason) (increase(lorrery_scheduler_workers_given_up_total[5m]))", "{{reason}}")],
                    COUNT,
                ),
                lines(
                    "Attachments",
                    "In five minutes. Above 0 long after startup: workers are lost and come back.",
                    [
                        Query(
                            f"sum by (worker) (increase(lorrery_worker_attachments_total{{{WORKER}}}[5m]))",
                            "{{worker}}",
                        )
                    ],
                    COUNT,
                    link="worker",
                ),
                lines(
                    "Faults on request",
                    "Steps slowed or delayed by `lorrery faults` or --fault, per wall second. 0 unless you injected"
                    " faults.",
                    [Query(rate("lorrery_worker_faults_total", "kind", WORKER), "{{kind}}")],
                    PER_SECOND,
                ),
            ],
        ),
    ],
    ("worker",),
)
