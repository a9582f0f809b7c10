"""The metric series of a worker. Durations of steps and gaps are device seconds, lags are wall seconds."""

from lorrery.service.telemetry.series import Series, table

_STEP_BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0),
)
_LAG_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0)
_TOKEN_BUCKETS = (*(1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0),)

INFO = Series(
    "lorrery_worker_info", "1", "Static properties of the worker; always 1.", ("gpu", "model", "tensor_parallel")
)
STATE = Series(
    "lorrery_worker_state",
    "1 or 0",
    "1 for the worker's current state, else 0.",
    ("state",),
    more="`loading` (the weights), `dialling` (the scheduler), `attached`, `draining`.",
)
ATTACHED = Series("lorrery_worker_attached", "1 or 0", "1 while attached to the scheduler, draining included, else 0.")
ATTACHMENTS = Series("lorrery_worker_attachments_total", "attachments", "Times the worker attached to a scheduler.")
KV_EVENT_BATCHES = Series(
    "lorrery_worker_kv_event_batches_total",
    "batches",
    "Batches of KV events published.",
    more="See [KV events](gateways.md#kv-events).",
)
KV_EVENT_REPLAYS = Series(
    "lorrery_worker_kv_event_replays_total", "requests", "Requests to replay batches of KV events."
)
STEPS = Series(
    "lorrery_worker_steps_total",
    "steps",
    "Steps executed, by kind: prefill, decode, mixed (both), empty (neither).",
    ("kind",),
)
STEP_MODELLED = Series(
    "lorrery_worker_step_modelled_seconds",
    "device seconds",
    "Duration of a step according to the step-time model.",
    buckets=_STEP_BUCKETS,
)
FAULTS = Series(
    "lorrery_worker_faults_total",
    "steps",
    "Steps slowed or delayed by an injected fault, by kind of fault.",
    ("kind",),
)
STEP_PARTS = Series(
    "lorrery_worker_step_part_seconds_total",
    "device seconds",
    "Step time by component, as split by the step-time model.",
    ("kind",),
    more="`compute`, `memory` (linear layers, the LM head), `kernel` (fixed costs of their kernels), `attention`,"
    " `all_reduce`, `lora`, `host` (the CPU), `whole` (models that do not split step time, and time added by a"
    " `slow_worker` fault); the components sum to the modelled seconds.",
)
FLOPS = Series("lorrery_worker_flops_total", "FLOP", "Modelled floating-point operations of one GPU.")
MEMORY_BYTES = Series(
    "lorrery_worker_memory_bytes_total", "bytes", "Modelled bytes read and written in the memory of one GPU."
)
PEAK_FLOPS = Series(
    "lorrery_worker_peak_flops_per_second",
    "FLOP/s",
    "Peak 16-bit floating-point operations per second of one GPU, from its data sheet.",
)
PEAK_BYTES = Series(
    "lorrery_worker_peak_memory_bytes_per_second", "bytes/s", "Peak memory bandwidth of one GPU, from its data sheet."
)
STEP_ACTUAL = Series(
    "lorrery_worker_step_actual_seconds",
    "device seconds",
    "Measured duration of a step, from the end of the previous one, or from its own start if there is none.",
    buckets=_STEP_BUCKETS,
)
LAG = Series(
    "lorrery_worker_lag_seconds",
    "wall seconds",
    "Time from the due end of a step until the worker woke up.",
    buckets=_LAG_BUCKETS,
)
GAPS = Series(
    "lorrery_worker_gaps_total",
    "steps",
    "Steps that started later than the preceding step boundary, because the worker or its plan was late.",
)
GAP_SECONDS = Series(
    "lorrery_worker_gap_seconds_total",
    "device seconds",
    "Idle time between steps because the worker or its plan was late.",
)
BATCH_SIZE = Series("lorrery_worker_batch_size", "sequences", "Sequences per step.", buckets=_BATCH_BUCKETS)
BATCH_TOKENS = Series("lorrery_worker_batch_tokens", "tokens", "Tokens computed per step.", buckets=_TOKEN_BUCKETS)
RUNNING = Series("lorrery_worker_running_sequences", "sequences", "Sequences on the device.")
KV_TOKENS = Series("lorrery_worker_kv_tokens", "tokens", "Tokens in the KV cache.")
KV_POOL = Series("lorrery_worker_kv_pool_tokens", "tokens", "Capacity of the KV cache in tokens.")
RESIDENT = Series("lorrery_worker_resident_adapters", "adapters", "Adapters on the device.")
ADAPTER_LOADS = Series(
    "lorrery_worker_adapter_loads_total",
    "adapters",
    "Adapters loaded because a plan needed them and they were not on the device.",
)
OUTPUT_TOKENS = Series("lorrery_worker_output_tokens_total", "tokens", "Output tokens produced.")
PREFILL_TOKENS = Series(
    "lorrery_worker_prefill_tokens_total",
    "tokens",
    "Tokens computed in prefills.",
    more="Excludes prefix hits; includes the earlier output of sequences that moved from another worker.",
)

TABLE = table(globals())
CONSTANT_LABELS = ("worker",)
"""Labels of all these series: the worker's name."""
