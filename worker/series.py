"""The metric series of a worker. Durations of steps and gaps are device seconds, lags are wall seconds."""

from lorrery.chassis.series import Series, table

_STEP_BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0),
)
_LAG_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0)
_TOKEN_BUCKETS = (*(1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0),)

INFO = Series("lorrery_worker_info", "1", "What the worker is; always 1.", ("gpu", "model", "tensor_parallel"))
STATE = Series(
    "lorrery_worker_state",
    "1 or 0",
    "1 for the state that the worker is in, else 0.",
    ("state",),
    more="`loading` (the weights), `dialling` (the scheduler), `attached`, `draining`.",
)
ATTACHED = Series("lorrery_worker_attached", "1 or 0", "1 while attached to the scheduler, draining included, else 0.")
ATTACHMENTS = Series("lorrery_worker_attachments_total", "attachments", "Times the worker attached to a scheduler.")
KV_EVENT_BATCHES = Series(
    "lorrery_worker_kv_event_batches_total",
    "batches",
    "Batches of KV events published.",
    more="See [KV events](kv-events.md).",
)
KV_EVENT_REPLAYS = Series(
    "lorrery_worker_kv_event_replays_total", "requests", "Requests for batches of KV events again."
)
STEPS = Series(
    "lorrery_worker_steps_total",
    "steps",
    "Steps run, by what they did: prefill, decode, mixed (both), empty (neither).",
    ("kind",),
)
STEP_MODELLED = Series(
    "lorrery_worker_step_modelled_seconds",
    "device seconds",
    "What the step-time model gave a step.",
    buckets=_STEP_BUCKETS,
)
FAULTS = Series(
    "lorrery_worker_faults_total",
    "steps",
    "Steps that a fault on request has slowed, or kept from beginning, by kind.",
    ("kind",),
)
STEP_PARTS = Series(
    "lorrery_worker_step_part_seconds_total",
    "device seconds",
    "Time of steps by what takes it, as the step-time model divides it.",
    ("kind",),
    more="`compute`, `memory` (linear layers, the head), `kernel` (fixed costs of their kernels), `attention`,"
    " `all_reduce`, `lora`, `host` (the CPU), `whole` (of a model that does not divide its steps, and what a"
    " `slow_worker` fault adds); they add up to the modelled seconds.",
)
FLOPS = Series("lorrery_worker_flops_total", "FLOP", "Floating-point operations of one GPU, modelled.")
MEMORY_BYTES = Series(
    "lorrery_worker_memory_bytes_total", "bytes", "Bytes of one GPU's memory read and written, modelled."
)
PEAK_FLOPS = Series(
    "lorrery_worker_peak_flops_per_second",
    "FLOP/s",
    "Floating-point operations per second of one GPU's data sheet, in 16 bits.",
)
PEAK_BYTES = Series(
    "lorrery_worker_peak_memory_bytes_per_second", "bytes/s", "Memory bandwidth of one GPU's data sheet."
)
STEP_ACTUAL = Series(
    "lorrery_worker_step_actual_seconds",
    "device seconds",
    "What a step took by the wall clock, from the end of the one before, or from its own start if none precedes it.",
    buckets=_STEP_BUCKETS,
)
LAG = Series(
    "lorrery_worker_lag_seconds",
    "wall seconds",
    "Between the time at which a step was due to end and the time at which the worker woke.",
    buckets=_LAG_BUCKETS,
)
GAPS = Series(
    "lorrery_worker_gaps_total",
    "steps",
    "Steps that started after the boundary before them, because the worker or its plan was late.",
)
GAP_SECONDS = Series(
    "lorrery_worker_gap_seconds_total",
    "device seconds",
    "Time lost between steps because the worker or its plan was late.",
)
BATCH_SIZE = Series("lorrery_worker_batch_size", "sequences", "Sequences in a step.", buckets=_BATCH_BUCKETS)
BATCH_TOKENS = Series("lorrery_worker_batch_tokens", "tokens", "Tokens computed in a step.", buckets=_TOKEN_BUCKETS)
RUNNING = Series("lorrery_worker_running_sequences", "sequences", "Sequences on the device.")
KV_TOKENS = Series("lorrery_worker_kv_tokens", "tokens", "Tokens in the KV cache.")
KV_POOL = Series("lorrery_worker_kv_pool_tokens", "tokens", "Tokens that fit in the KV cache.")
RESIDENT = Series("lorrery_worker_resident_adapters", "adapters", "Adapters on the device.")
ADAPTER_LOADS = Series(
    "lorrery_worker_adapter_loads_total",
    "adapters",
    "Adapters loaded: a plan asked for them and they were not on the device.",
)
OUTPUT_TOKENS = Series("lorrery_worker_output_tokens_total", "tokens", "Tokens made.")
PREFILL_TOKENS = Series(
    "lorrery_worker_prefill_tokens_total",
    "tokens",
    "Tokens computed in prefills.",
    more="Without prefix hits, including what a moved sequence had produced elsewhere.",
)

TABLE = table(globals())
CONSTANT_LABELS = ("worker",)
"""Labels of all these series: the worker's name."""
