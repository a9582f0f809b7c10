"""Scheduling: why requests wait, how batches look, what memory does."""

from deploy.dashboards.board import Board, Row
from deploy.dashboards.panels import (
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
    "Why do requests wait, how full are the batches, and is it memory, adapters or compute that bounds them?",
    [
        Row(
            "Queue",
            [
                lines(
                    "Waiting and running",
                    "Waiting: for admission, on all workers and for one; of these held: until their key runs fewer"
                    " others, and unplaced: no worker is attached. Running: in a batch. Look for waiting that climbs"
                    " while running stays level.",
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
                    "From arrival at the scheduler to first admission, device seconds. Look for p99 that leaves p50:"
                    " some wait for an adapter or for memory while others pass.",
                    percentiles(QUEUE),
                    SECONDS,
                ),
                lines(
                    "Time of a request",
                    "Where the mean request spends its time in the scheduler, device seconds; the parts add up. Queue:"
                    " add workers. Adapter load: see LoRA. Prefill: long prompts, or prefix hits that are missing."
                    " Decode: see batch size and step time.",
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
                    "Steps by the sequences that they gave a token. Look for a ceiling: max_num_seqs, or memory.",
                    "lorrery_scheduler_batch_size",
                    COUNT,
                ),
                heat(
                    "Batch tokens",
                    "Steps by the tokens that they computed: the new ones of each prefill, one for each decode. Look"
                    " for a far upper band: whole prompts in one step, for which decodes wait.",
                    "lorrery_scheduler_batch_tokens",
                    COUNT,
                ),
                lines(
                    "Step time by kind",
                    "Duration of a step, device seconds; one that decodes counts as decode. Look for decode's p99 near"
                    " prefill's: they share steps.",
                    [
                        Query(quantile(q, "lorrery_scheduler_step_seconds", "kind"), f"{{{{kind}}}} p{q * 100:g}")
                        for q in (0.5, 0.99)
                    ],
                    SECONDS,
                ),
                lines(
                    "Steps/s by kind",
                    "Steps that the workers ran, per wall second. empty: a step without a sequence, as strict modes"
                    " have.",
                    [Query(rate("lorrery_worker_steps_total", "kind", WORKER), "{{kind}}")],
                    PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Running and waiting by worker",
                    "Sequences in the batch and in the queue of each worker. Look for one that waits while another"
                    " idles: the placement.",
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
                    "Share of the KV pool that is in use; where it is paged, a shared block counts once. Look for a"
                    " pool at 100 % while requests wait: memory bounds the batch.",
                    [Query(f"lorrery:worker_kv_used:ratio{{{WORKER}}}", "{{worker}}")],
                    RATIO,
                    {"orange": 0.8, "red": 0.95},
                    maximum=1,
                    link="worker",
                ),
                lines(
                    'KV blocks (memory = "paged")',
                    "Blocks of all pools: used by sequences and adapters, cached (unused, reclaimed on demand), free."
                    " Look for cached that is eaten up by used: prefix hits will go.",
                    [Query(f"sum by (state) ({BLOCKS}{{{WORKER}}})", "{{state}}")],
                    COUNT,
                    stacked=True,
                ),
                lines(
                    "Preemptions and second admissions",
                    "Per wall second: sequences whose blocks went to others, sequences queued again after a loss,"
                    " requests moved to another worker while they waited. Preempted work is computed again: look for"
                    " more than a few.",
                    [
                        Query(rate("lorrery_scheduler_preemptions_total"), "preempted"),
                        Query(rate("lorrery_scheduler_requeued_sequences_total"), "queued again"),
                        Query(rate("lorrery_scheduler_moved_requests_total"), "moved"),
                    ],
                    PER_SECOND,
                ),
                lines(
                    "Prefix hits",
                    "Share of the prompt tokens looked up that were in a prefix cache; no value where nothing was"
                    " looked up.",
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
                    "Per wall second; what was not found is computed. Evictions are blocks. Look for evictions that"
                    " rise while hits fall: the cache is too small for what comes back.",
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
                    "A plan holds until something the scheduler knows can change it. Late: an arrival or cancel that"
                    " took effect after the first possible boundary. Look for late ones beyond a few per cent: network"
                    " or CPU.",
                    [
                        Query(rate("lorrery_scheduler_plans_total"), "plans"),
                        Query(rate("lorrery_scheduler_late_interrupts_total"), "late interrupts"),
                    ],
                    PER_SECOND,
                ),
                lines(
                    "Steps per plan",
                    "How many steps a plan runs for. Few where requests come and go quickly, or a policy looks at each"
                    " step.",
                    [
                        Query(
                            ratio(rate("lorrery_worker_steps_total"), rate("lorrery_scheduler_plans_total")),
                            "steps per plan",
                        )
                    ],
                    COUNT,
                ),
                lines(
                    "CPU of a planning and of a commit",
                    "Mean CPU seconds of the scheduler's thread. A commit must not grow with the batch; a planning may"
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
