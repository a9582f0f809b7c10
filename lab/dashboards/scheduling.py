"""Scheduling: why requests wait, how batches look, what memory does."""

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
    percentiles,
    quantile,
    rate,
    ratio,
)

WORKER = 'worker=~"$worker"'
QUEUE = "lorrery_scheduler_queue_seconds"
PHASE = "lorrery_scheduler_request_phase_seconds"
BLOCKS = "lorrery_scheduler_worker_kv_blocks"

BOARD = Board(
    "scheduling",
    "Scheduling",
    "Why do requests wait, how full are the batches, and is memory, adapters or compute the bottleneck?",
    [
        Row(
            "Queue",
            [
                lines(
                    "Waiting and running",
                    "Waiting: for admission, over all workers; of these, held: by the concurrency limit of their key,"
                    " and unplaced: no worker is attached. Running: in a batch. Look for waiting that climbs while"
                    " running stays level.",
                    [
                        Query("lorrery:waiting_requests:sum", "waiting"),
                        Query("sum(lorrery_scheduler_held_requests)", "of these held"),
                        Query("sum(lorrery_scheduler_unplaced_requests)", "of these unplaced"),
                        Query("lorrery:running_requests:sum", "running"),
                    ],
                    COUNT,
                ),
                lines(
                    "Queue time",
                    "From arrival at the scheduler to first admission, device seconds. Look for p99 that diverges from"
                    " p50: some wait for an adapter or for memory while others pass.",
                    percentiles(QUEUE),
                    SECONDS,
                ),
                lines(
                    "Time of a request",
                    "Where the mean request spends its time in the scheduler, device seconds; the parts sum to the"
                    " whole. Queue: add workers. Adapter load: see LoRA. Prefill: long prompts, or missing prefix"
                    " hits. Decode: see batch size and step time.",
                    [Query(mean(PHASE, "phase"), "{{phase}}")],
                    SECONDS,
                    stacked=True,
                ),
            ],
        ),
        Row(
            "Batch",
            [
                heat(
                    "Batch size",
                    "Steps by the number of sequences that get a token. Look for a ceiling: max_num_seqs, or memory.",
                    "lorrery_scheduler_batch_size",
                    COUNT,
                ),
                heat(
                    "Batch tokens",
                    "Steps by the number of tokens computed: the new tokens of each prefill, one for each decode. Look"
                    " for an upper band far away: whole prompts in one step, for which decodes wait.",
                    "lorrery_scheduler_batch_tokens",
                    COUNT,
                ),
                lines(
                    "Step time by kind",
                    "Duration of a step, device seconds; a step with any decode counts as decode. Look for decode's"
                    " p99 near prefill's: they share steps.",
                    [
                        Query(quantile(q, "lorrery_scheduler_step_seconds", "kind"), f"{{{{kind}}}} p{q * 100:g}")
                        for q in (0.5, 0.99)
                    ],
                    SECONDS,
                ),
                lines(
                    "Steps/s by kind",
                    "Steps executed by the workers, per wall second. empty: a step without a sequence, as in strict"
                    " modes.",
                    [Query(rate("lorrery_worker_steps_total", "kind", WORKER), "{{kind}}")],
                    PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Running and waiting by worker",
                    "Sequences in the batch and in the queue of each worker. Look for one with a queue while another"
                    " idles: check the placement.",
                    [
                        Query(f"lorrery_scheduler_worker_running_sequences{{{WORKER}}}", "{{worker}} running"),
                        Query(f"lorrery_scheduler_worker_waiting_sequences{{{WORKER}}}", "{{worker}} waiting"),
                    ],
                    COUNT,
                    link="worker",
                ),
            ],
        ),
        Row(
            "Memory",
            [
                lines(
                    "KV use by worker",
                    "Share of the KV pool in use; in paged mode a shared block counts once. Look for a pool at 100 %"
                    " while requests wait: memory limits the batch.",
                    [Query(f"lorrery:worker_kv_used:ratio{{{WORKER}}}", "{{worker}}")],
                    RATIO,
                    {"orange": 0.8, "red": 0.95},
                    maximum=1,
                    link="worker",
                ),
                lines(
                    'KV blocks (memory = "paged")',
                    "Blocks of all pools: used by sequences and adapters, cached (unused, reclaimed on demand), free."
                    " Look for used displacing cached: prefix hits will drop.",
                    [Query(f"sum by (state) ({BLOCKS}{{{WORKER}}})", "{{state}}")],
                    COUNT,
                    stacked=True,
                ),
                lines(
                    "Preemptions and second admissions",
                    "Per wall second: sequences preempted, sequences requeued after a loss, requests moved to another"
                    " worker while waiting. Preempted work is recomputed: look for more than a few.",
                    [
                        Query(rate("lorrery_scheduler_preemptions_total"), "preempted"),
                        Query(rate("lorrery_scheduler_requeued_sequences_total"), "queued again"),
                        Query(rate("lorrery_scheduler_moved_requests_total"), "moved"),
                    ],
                    PER_SECOND,
                ),
                lines(
                    "Prefix hits",
                    "Share of the looked-up prompt tokens found in a prefix cache; no value where nothing was looked"
                    " up.",
                    [
                        Query(
                            ratio(
                                rate("lorrery_scheduler_prefix_cache_hits_total"),
                                rate("lorrery_scheduler_prefix_cache_queries_total"),
                            ),
                            "hits",
                        )
                    ],
                    RATIO,
                    maximum=1,
                    width=12,
                ),
                lines(
                    "Prompt tokens, looked up and found",
                    "Per wall second; tokens not found are computed. Evictions are in blocks. Look for evictions that"
                    " rise while hits fall: the cache is too small for the reused prefixes.",
                    [
                        Query(rate("lorrery_scheduler_prefix_cache_queries_total"), "looked up"),
                        Query(rate("lorrery_scheduler_prefix_cache_hits_total"), "found"),
                        Query(rate("lorrery_worker_prefill_tokens_total"), "computed"),
                        Query(rate("lorrery_scheduler_prefix_cache_evictions_total"), "blocks evicted"),
                    ],
                    TOKENS_PER_SECOND,
                    width=12,
                ),
            ],
        ),
        Row(
            "The scheduler's own work",
            [
                lines(
                    "Plans/s and late interrupts/s",
                    "A plan holds until an event known to the scheduler can change it. Late: an arrival or"
                    " cancellation that took effect after the first possible boundary. Look for more than a few per"
                    " cent late: network or CPU.",
                    [
                        Query(rate("lorrery_scheduler_plans_total"), "plans"),
                        Query(rate("lorrery_scheduler_late_interrupts_total"), "late interrupts"),
                    ],
                    PER_SECOND,
                ),
                lines(
                    "Steps per plan",
                    "Steps per plan. Few where requests come and go quickly, or where a policy decides at every step.",
                    [
                        Query(
                            ratio(rate("lorrery_worker_steps_total"), rate("lorrery_scheduler_plans_total")),
                            "steps per plan",
                        )
                    ],
                    COUNT,
                ),
                lines(
                    "CPU time of a plan and of a commit",
                    "Mean CPU seconds of the scheduler's thread. A commit must not grow with the batch; a plan may"
                    " with the queue.",
                    [
                        Query(mean("lorrery_scheduler_plan_cpu_seconds"), "planning"),
                        Query(mean("lorrery_scheduler_commit_cpu_seconds"), "commit"),
                    ],
                    SECONDS,
                ),
            ],
        ),
    ],
    ("worker",),
)
