"""The series that a scheduler shows. Gauges are read at each scrape, so that steps cost nothing for them."""

from lorrery.chassis.series import Series, table

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
    more="`eos`, `stop`, `length`, `aborted` (strict mode: a cancelled one at its sweep), `cancelled`, `dropped` (by"
    " its queue), `refused`, `failed` (a policy raised).",
)
ORPHANED = Series(
    "lorrery_scheduler_orphaned_requests_total",
    "requests",
    "Requests withdrawn since their router's stream ended, and not in requests_total.",
    more="One that its router resumes counts once, when it ends.",
)
IN_FLIGHT = Series("lorrery_scheduler_in_flight_requests", "requests", "Requests that have not ended.")
WAITING = Series(
    "lorrery_scheduler_waiting_requests", "requests", "Requests that wait for admission on a worker, or for a worker."
)
UNPLACED = Series(
    "lorrery_scheduler_unplaced_requests",
    "requests",
    "Of the waiting requests, those for which there is no worker yet.",
)
HELD = Series(
    "lorrery_scheduler_held_requests",
    "requests",
    "Of the waiting requests, those that wait until their key runs fewer others.",
    more="See `max_running` of a key.",
)
RUNNING = Series("lorrery_scheduler_running_requests", "requests", "Requests in a batch.")
ADAPTER_WAITING = Series(
    "lorrery_scheduler_adapter_waiting_requests",
    "requests",
    "Requests that wait, by adapter, for whatever reason.",
    ("adapter",),
)
ADAPTER_RUNNING = Series(
    "lorrery_scheduler_adapter_running_requests", "requests", "Requests in a batch, by adapter.", ("adapter",)
)
TENANT_WAITING = Series(
    "lorrery_scheduler_tenant_waiting_requests",
    "requests",
    "Requests that wait, by tenant, for whatever reason.",
    ("tenant",),
)
TENANT_RUNNING = Series(
    "lorrery_scheduler_tenant_running_requests", "requests", "Requests in a batch, by tenant.", ("tenant",)
)
TENANT_SERVICE_TOKENS = Series(
    "lorrery_scheduler_tenant_service_tokens_total",
    "tokens",
    "Tokens that tenants were served, counted when a request that was admitted ends.",
    ("tenant", "kind"),
    more="`prompt` and `output`; what the fairness ratio is made of.",
)
FAIRNESS = Series(
    "lorrery_scheduler_tenant_fairness_ratio",
    "ratio",
    "Jain's index of the tokens that tenants were served lately: 1 all alike, 1 / n one alone.",
    more="Of requests that ended in this minute of device time and the one before.",
)
PROMPT_TOKENS = Series(
    "lorrery_scheduler_prompt_tokens_total",
    "tokens",
    "Prompts of admitted requests, once per request, however often it is queued again or resumed.",
)
OUTPUT_TOKENS = Series("lorrery_scheduler_output_tokens_total", "tokens", "Tokens that workers produced.")
QUEUE = Series(
    "lorrery_scheduler_queue_seconds",
    "device seconds",
    "From arrival at the scheduler to first admission.",
    buckets=_WAIT_BUCKETS,
)
REQUEST_PHASE = Series(
    "lorrery_scheduler_request_phase_seconds",
    "device seconds",
    "What a finished request spent in each phase; the phases add up to its time in the scheduler.",
    ("phase",),
    _WAIT_BUCKETS,
    more="`queue`, `adapter_load` (only its own adapter was missing: the wait for a place on the GPU, and the load),"
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
    "From arrival at the scheduler to the end of the prefill: TTFT without router and network.",
    buckets=_WAIT_BUCKETS,
)
STEP = Series(
    "lorrery_scheduler_step_seconds",
    "device seconds",
    "Duration of a step, by kind: prefill or decode; one that decodes counts as decode.",
    ("kind",),
    _STEP_BUCKETS,
)
BATCH_SIZE = Series(
    "lorrery_scheduler_batch_size", "sequences", "Sequences given a token in a step.", buckets=_SIZE_BUCKETS
)
BATCH_TOKENS = Series(
    "lorrery_scheduler_batch_tokens",
    "tokens",
    "Tokens computed in a step.",
    buckets=_TOKEN_BUCKETS,
    more="The new ones of each prefill, and one for each sequence that decodes beside them.",
)
PLANS = Series("lorrery_scheduler_plans_total", "plans", "Plans sent to workers; each runs for one step or many.")
LATE_INTERRUPTS = Series(
    "lorrery_scheduler_late_interrupts_total",
    "events",
    "Arrivals and cancels that took effect after the first possible boundary.",
)
GAPS = Series("lorrery_scheduler_gap_seconds_total", "device seconds", "Time in which workers with a plan stood idle.")
PLAN_CPU = Series(
    "lorrery_scheduler_plan_cpu_seconds",
    "CPU seconds",
    "CPU time of the scheduler's thread for one planning.",
    buckets=_CPU_BUCKETS,
)
COMMIT_CPU = Series(
    "lorrery_scheduler_commit_cpu_seconds",
    "CPU seconds",
    "CPU time of the scheduler's thread for one commit.",
    buckets=_CPU_BUCKETS,
)
PREFIX_QUERIES = Series(
    "lorrery_scheduler_prefix_cache_queries_total",
    "tokens",
    "Input tokens looked up in the prefix cache, once per admission; 0 without a cache.",
    more="After a preemption the output so far is input.",
)
PREFIX_HITS = Series(
    "lorrery_scheduler_prefix_cache_hits_total", "tokens", "Of the tokens looked up in the prefix cache, those found."
)
PREFIX_EVICTIONS = Series(
    "lorrery_scheduler_prefix_cache_evictions_total", "blocks", "Blocks evicted from prefix caches of kind blocks."
)
ADAPTER_LOADS = Series(
    "lorrery_scheduler_adapter_loads_total",
    "adapters",
    "Loads of adapters into a worker's device memory that have ended, by where from and how.",
    ("tier", "outcome"),
    more="`tier`: `host`, `disk`. `outcome`: `ok`, `failed`; who fails is tried again up to `max_load_attempts` times.",
)
LOADS_BY_ADAPTER = Series(
    "lorrery_scheduler_loads_by_adapter_total",
    "adapters",
    "Loads into a worker's device memory that have ended, by adapter.",
    ("adapter",),
)
ADAPTER_LOAD = Series(
    "lorrery_scheduler_adapter_load_seconds",
    "device seconds",
    "Duration of a load of an adapter, by where from; the wait for its turn is not in it.",
    ("tier",),
    _LOAD_BUCKETS,
)
ADAPTER_EVICTIONS = Series(
    "lorrery_scheduler_adapter_evictions_total",
    "adapters",
    "Adapters put out of a worker's memory, by level: gpu or host.",
    ("level",),
)
ADAPTER_THRASH = Series(
    "lorrery_scheduler_adapter_thrash_total",
    "adapters",
    "Loads of adapters which the same worker's GPU had evicted within a minute of device time before.",
    ("adapter",),
)
ADAPTER_PINS = Series(
    "lorrery_scheduler_adapter_pins", "sequences", "Running sequences, each of which pins its adapter in memory."
)
ROUTERS = Series("lorrery_scheduler_routers", "routers", "Connected routers.")
WORKERS = Series("lorrery_scheduler_workers", "workers", "Attached workers, by state: ready or draining.", ("state",))
WORKERS_LOST = Series("lorrery_scheduler_workers_lost_total", "workers", "Workers that are gone without draining.")
WORKERS_GIVEN_UP = Series(
    "lorrery_scheduler_workers_given_up_total",
    "workers",
    "Workers whose stream the scheduler ended, by reason.",
    ("reason",),
    more="`silent` for `worker_timeout_seconds`, `stalled` (a plan, and no progress with it), `error` (an exception in"
    " a decision for it), `protocol` (it said what cannot be), `superseded` (it dialled again), `fault` (an operator's"
    " `worker_loss`).",
)
FAULTS = Series(
    "lorrery_scheduler_faults_total",
    "faults",
    "Faults on request that have happened to loads and workers, by kind.",
    ("kind",),
    more="See [faults.md](faults.md).",
)
MOVED = Series(
    "lorrery_scheduler_moved_requests_total",
    "requests",
    "Requests that moved to another worker while they waited, to start there earlier.",
)
REQUEUED = Series(
    "lorrery_scheduler_requeued_sequences_total",
    "sequences",
    "Sequences queued again after a worker was lost or left.",
)
PREEMPTIONS = Series(
    "lorrery_scheduler_preemptions_total",
    "sequences",
    "Sequences preempted: their blocks went to others and they wait again.",
    more='Where `memory = "paged"`.',
)
WORKER_RUNNING = Series(
    "lorrery_scheduler_worker_running_sequences", "sequences", "Sequences in this worker's batch.", ("worker",)
)
WORKER_WAITING = Series(
    "lorrery_scheduler_worker_waiting_sequences", "sequences", "Sequences in this worker's queue.", ("worker",)
)
WORKER_KV = Series(
    "lorrery_scheduler_worker_kv_tokens", "tokens", "KV tokens that this worker's sequences hold.", ("worker",)
)
WORKER_KV_POOL = Series(
    "lorrery_scheduler_worker_kv_pool_tokens", "tokens", "Size of this worker's KV pool.", ("worker",)
)
WORKER_KV_BLOCKS = Series(
    "lorrery_scheduler_worker_kv_blocks",
    "blocks",
    "Blocks of this worker's paged KV pool, by state.",
    ("worker", "state"),
    more='Where `memory = "paged"`: `used` by sequences and adapters (a shared block counts once; those of the coming'
    " step are included), `cached` (unused, reclaimed on demand), `free`.",
)
WORKER_RESIDENT = Series(
    "lorrery_scheduler_worker_resident_adapters", "adapters", "Adapters in this worker's GPU memory.", ("worker",)
)
WORKER_LOADING = Series(
    "lorrery_scheduler_worker_loading_adapters",
    "adapters",
    "Loads of adapters that this worker has under way.",
    ("worker",),
)
WORKER_ADAPTER_RESIDENT = Series(
    "lorrery_scheduler_worker_adapter_resident",
    "adapters",
    "1 where the adapter is in this memory of this worker, else 0; of other: how many others are.",
    ("worker", "adapter", "level"),
    more="`level`: `gpu` (usable), `host` (cached, which those on the GPU usually are too).",
)

TABLE = table(globals())
