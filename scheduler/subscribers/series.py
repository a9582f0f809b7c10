"""Metrics of a scheduler. Gauges are computed at each scrape, so that steps cost nothing for them."""

from lorrery.service.telemetry.series import Series, table

_STEP_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_WAIT_BUCKETS = (*(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),)
_LOAD_BUCKETS = (0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_CPU_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)
_SIZE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_TOKEN_BUCKETS = (
    *(1.0, 8.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0),
)
# Fewer buckets for series that exist per adapter or tenant.
_WAIT_BY_NAME_BUCKETS = (0.01, 0.05, 0.2, 0.5, 1.0, 2.5, 10.0, 60.0)

REQUESTS = Series(
    "lorrery_scheduler_requests_total",
    "requests",
    "Requests that ended, by outcome.",
    ("outcome",),
    more="`eos`, `stop` (by the worker or, for text, by the router), `length`, `aborted` (strict mode: a cancelled"
    " request, removed by the sweep), `cancelled` (without having finished), `dropped` (by the queue policy),"
    " `refused`, `failed` (a policy raised).",
)
CANCELS = Series(
    "lorrery_scheduler_cancels_total",
    "requests",
    "Requests that a cancel has ended, by its cause, whatever they count as.",
    ("cause",),
    more="[Cancels](failures.md#cancels) says what each cause counts as.",
)
ORPHANED = Series(
    "lorrery_scheduler_orphaned_requests_total",
    "requests",
    "Requests withdrawn because their router's stream ended; not counted in requests_total.",
    more="A request that its router resumes is counted once in requests_total, when it ends.",
)
IN_FLIGHT = Series("lorrery_scheduler_in_flight_requests", "requests", "Requests that have not ended.")
WAITING = Series(
    "lorrery_scheduler_waiting_requests", "requests", "Requests waiting for admission on a worker, or for a worker."
)
UNPLACED = Series(
    "lorrery_scheduler_unplaced_requests",
    "requests",
    "Waiting requests not assigned to a worker because there is none.",
)
HELD = Series(
    "lorrery_scheduler_held_requests",
    "requests",
    "Waiting requests held back by the concurrency limit of their API key.",
    more="See `max_running` of a key.",
)
RUNNING = Series("lorrery_scheduler_running_requests", "requests", "Requests in a batch.")
ADAPTER_WAITING = Series(
    "lorrery_scheduler_adapter_waiting_requests",
    "requests",
    "Waiting requests, by adapter, for any reason.",
    ("adapter",),
)
ADAPTER_RUNNING = Series(
    "lorrery_scheduler_adapter_running_requests", "requests", "Requests in a batch, by adapter.", ("adapter",)
)
TENANT_WAITING = Series(
    "lorrery_scheduler_tenant_waiting_requests",
    "requests",
    "Waiting requests, by tenant, for any reason.",
    ("tenant",),
)
TENANT_RUNNING = Series(
    "lorrery_scheduler_tenant_running_requests", "requests", "Requests in a batch, by tenant.", ("tenant",)
)
TENANT_SERVICE_TOKENS = Series(
    "lorrery_scheduler_tenant_service_tokens_total",
    "tokens",
    "Tokens served, by tenant, counted when an admitted request ends.",
    ("tenant", "kind"),
    more="`prompt` and `output`; the fairness ratio is computed from these.",
)
FAIRNESS = Series(
    "lorrery_scheduler_tenant_fairness_ratio",
    "ratio",
    "Jain's index of the tokens recently served to each tenant: 1 if all got the same, 1 / n if one of n got all.",
    more="Over requests that ended in the current minute of device time and the previous one.",
)
PROMPT_TOKENS = Series(
    "lorrery_scheduler_prompt_tokens_total",
    "tokens",
    "Prompt tokens of admitted requests, counted once per request however often it is requeued or resumed.",
)
OUTPUT_TOKENS = Series("lorrery_scheduler_output_tokens_total", "tokens", "Output tokens produced by workers.")
QUEUE = Series(
    "lorrery_scheduler_queue_seconds",
    "device seconds",
    "From arrival at the scheduler to first admission.",
    buckets=_WAIT_BUCKETS,
)
REQUEST_PHASE = Series(
    "lorrery_scheduler_request_phase_seconds",
    "device seconds",
    "Time that a finished request spent in each phase; the phases sum to its time in the scheduler.",
    ("phase",),
    _WAIT_BUCKETS,
    more="`queue`, `adapter_load` (only its adapter was missing: waiting for space on the GPU, and loading),"
    " `prefill`, `decode`.",
)
ADAPTER_QUEUE = Series(
    "lorrery_scheduler_adapter_queue_seconds",
    "device seconds",
    "From arrival at the scheduler to first admission, by adapter.",
    ("adapter",),
    _WAIT_BY_NAME_BUCKETS,
)
TENANT_QUEUE = Series(
    "lorrery_scheduler_tenant_queue_seconds",
    "device seconds",
    "From arrival at the scheduler to first admission, by tenant.",
    ("tenant",),
    _WAIT_BY_NAME_BUCKETS,
)
TTFT = Series(
    "lorrery_scheduler_time_to_first_token_seconds",
    "device seconds",
    "TTFT without router and network: from arrival at the scheduler to the end of the prefill.",
    buckets=_WAIT_BUCKETS,
)
STEP = Series(
    "lorrery_scheduler_step_seconds",
    "device seconds",
    "Duration of a step, by kind: prefill or decode; a step with any decode counts as decode.",
    ("kind",),
    _STEP_BUCKETS,
)
BATCH_SIZE = Series(
    "lorrery_scheduler_batch_size", "sequences", "Sequences that get a token in a step.", buckets=_SIZE_BUCKETS
)
BATCH_TOKENS = Series(
    "lorrery_scheduler_batch_tokens",
    "tokens",
    "Tokens computed in a step.",
    buckets=_TOKEN_BUCKETS,
    more="The new tokens of each prefill, plus one for each decoding sequence.",
)
PLANS = Series("lorrery_scheduler_plans_total", "plans", "Plans sent to workers; each covers one or more steps.")
LATE_INTERRUPTS = Series(
    "lorrery_scheduler_late_interrupts_total",
    "events",
    "Arrivals and cancellations that took effect later than the first possible step boundary.",
)
GAPS = Series("lorrery_scheduler_gap_seconds_total", "device seconds", "Time that workers with a plan stood idle.")
PLAN_CPU = Series(
    "lorrery_scheduler_plan_cpu_seconds",
    "CPU seconds",
    "CPU time of the scheduler's thread to compute one plan.",
    buckets=_CPU_BUCKETS,
)
COMMIT_CPU = Series(
    "lorrery_scheduler_commit_cpu_seconds",
    "CPU seconds",
    "CPU time of the scheduler's thread to commit one step.",
    buckets=_CPU_BUCKETS,
)
PREFIX_QUERIES = Series(
    "lorrery_scheduler_prefix_cache_queries_total",
    "tokens",
    "Input tokens looked up in the prefix cache; 0 without a cache.",
    more="A request counts once, at its first admission, as in vLLM: not again after a preemption, a loss of its worker"
    " or a resumption. One that skips the cache does not count.",
)
PREFIX_HITS = Series(
    "lorrery_scheduler_prefix_cache_hits_total",
    "tokens",
    "Input tokens found in the prefix cache.",
    more="Of those that `lorrery_scheduler_prefix_cache_queries_total` counts.",
)
PREFIX_EVICTIONS = Series(
    "lorrery_scheduler_prefix_cache_evictions_total", "blocks", "Blocks evicted from prefix caches of kind blocks."
)
ADAPTER_LOADS = Series(
    "lorrery_scheduler_adapter_loads_total",
    "adapters",
    "Finished adapter loads, by source tier and outcome.",
    ("tier", "outcome"),
    more="`tier`: `host`, `disk`. `outcome`: `ok`, `failed`; a failed load is retried until 3 attempts have failed.",
)
LOADS_BY_ADAPTER = Series(
    "lorrery_scheduler_loads_by_adapter_total",
    "adapters",
    "Finished adapter loads into a worker's GPU memory, by adapter.",
    ("adapter",),
)
FAILED_LOADS_BY_ADAPTER = Series(
    "lorrery_scheduler_failed_loads_by_adapter_total", "adapters", "Those loads that failed, by adapter.", ("adapter",)
)
LOAD_SECONDS_BY_ADAPTER = Series(
    "lorrery_scheduler_load_seconds_by_adapter_total",
    "device seconds",
    "Total duration of these loads, by adapter and source tier.",
    ("adapter", "tier"),
)
EVICTIONS_BY_ADAPTER = Series(
    "lorrery_scheduler_evictions_by_adapter_total",
    "adapters",
    "Evictions from a worker's GPU memory, by adapter.",
    ("adapter",),
)
ADAPTER_RESIDENT_SECONDS = Series(
    "lorrery_scheduler_adapter_resident_seconds_total",
    "device seconds",
    "Time that adapters were in a worker's GPU memory, by adapter, counted when a stay ends.",
    ("adapter",),
    more="By an eviction or the loss of the worker; present stays show in `lorrery_scheduler_worker_adapter_resident`.",
)
ADAPTER_LOAD = Series(
    "lorrery_scheduler_adapter_load_seconds",
    "device seconds",
    "Duration of an adapter load, by source tier, without time queued for other loads.",
    ("tier",),
    _LOAD_BUCKETS,
)
ADAPTER_EVICTIONS = Series(
    "lorrery_scheduler_adapter_evictions_total",
    "adapters",
    "Adapters evicted from a worker's memory, by level: gpu or host.",
    ("level",),
)
ADAPTER_THRASH = Series(
    "lorrery_scheduler_adapter_thrash_total",
    "adapters",
    "Loads of an adapter that the same worker's GPU evicted less than a minute of device time before.",
    ("adapter",),
)
ADAPTER_PINS = Series(
    "lorrery_scheduler_adapter_pins", "sequences", "Running sequences with an adapter, each of which pins it in memory."
)
ROUTERS = Series("lorrery_scheduler_routers", "routers", "Connected routers.")
WORKERS = Series("lorrery_scheduler_workers", "workers", "Attached workers, by state: ready or draining.", ("state",))
WORKERS_LOST = Series("lorrery_scheduler_workers_lost_total", "workers", "Workers that disappeared without draining.")
WORKERS_GIVEN_UP = Series(
    "lorrery_scheduler_workers_given_up_total",
    "workers",
    "Workers whose stream the scheduler closed, by reason.",
    ("reason",),
    more="`silent` for `worker_timeout_seconds`, `stalled` (no progress on a plan), `error` (an exception in a"
    " decision for it), `protocol` (it sent an invalid message), `superseded` (it reconnected), `fault` (an operator's"
    " `worker_loss`).",
)
FAULTS = Series(
    "lorrery_scheduler_faults_total",
    "faults",
    "Injected faults that affected loads and workers, by kind.",
    ("kind",),
    more="See [faults](failures.md#faults-on-request).",
)
MOVED = Series(
    "lorrery_scheduler_moved_requests_total",
    "requests",
    "Requests moved to another worker while waiting, to start earlier there.",
)
REQUEUED = Series(
    "lorrery_scheduler_requeued_sequences_total", "sequences", "Sequences requeued after a worker was lost or left."
)
PREEMPTIONS = Series(
    "lorrery_scheduler_preemptions_total",
    "sequences",
    "Sequences preempted: their blocks were given to others and they wait again.",
    more='Where `memory` is `"paged"` or `"on_demand"`.',
)
WORKER_RUNNING = Series(
    "lorrery_scheduler_worker_running_sequences", "sequences", "Sequences in this worker's batch.", ("worker",)
)
WORKER_WAITING = Series(
    "lorrery_scheduler_worker_waiting_sequences", "sequences", "Sequences in this worker's queue.", ("worker",)
)
WORKER_KV = Series(
    "lorrery_scheduler_worker_kv_tokens", "tokens", "KV tokens held by this worker's sequences.", ("worker",)
)
WORKER_KV_POOL = Series(
    "lorrery_scheduler_worker_kv_pool_tokens", "tokens", "Size of this worker's KV pool.", ("worker",)
)
WORKER_KV_BLOCKS = Series(
    "lorrery_scheduler_worker_kv_blocks",
    "blocks",
    "Blocks of this worker's paged KV pool, by state.",
    ("worker", "state"),
    more="Where memory is in blocks: `used` by sequences and adapters (a shared block counts once; blocks of the next"
    " step included), `cached` (unused, reclaimed on demand), `free`.",
)
WORKER_RESIDENT = Series(
    "lorrery_scheduler_worker_resident_adapters", "adapters", "Adapters in this worker's GPU memory.", ("worker",)
)
WORKER_LOADING = Series(
    "lorrery_scheduler_worker_loading_adapters",
    "adapters",
    "Adapter loads in progress on this worker.",
    ("worker",),
)
WORKER_ADAPTER_RESIDENT = Series(
    "lorrery_scheduler_worker_adapter_resident",
    "adapters",
    "1 if the adapter is in this memory of this worker, else 0; for other, the number of other adapters there.",
    ("worker", "adapter", "level"),
    more="`level`: `gpu` (usable), `host` (cached; usually includes the adapters on the GPU).",
)

TABLE = table(globals())
