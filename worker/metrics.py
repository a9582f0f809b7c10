"""What a worker counts. Durations of steps and gaps are device seconds, lags are wall seconds."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lorrery.chassis.faults import FREEZE_WORKER, SLOW_WORKER
from lorrery.chassis.metrics import labelled
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import Batch
from lorrery.worker.device.cost import PARTS, StepCost

STATES = ("loading", "dialling", "attached", "draining")

_STEP_BUCKETS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08)
_LONG_STEP_BUCKETS = (0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0)
_LAG_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_TOKEN_BUCKETS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class WorkerMetrics:
    """The worker's metrics, all present from the start.

    Args:
        registry: where they are shown.
        name: the worker's, label `worker` of all of them.
        kv_pool_tokens: size of the KV pool.
        peak_flops: of one GPU's data sheet, per second.
        peak_bytes: of one GPU's memory, per second.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        kv_pool_tokens: int,
        *,
        peak_flops: float = 0.0,
        peak_bytes: float = 0.0,
    ) -> None:
        registry = labelled(registry, worker=name)
        steps = Counter("lorrery_worker_steps_total", "Steps run, by what they did.", ["kind"], registry=registry)
        self._steps = {kind: steps.labels(kind) for kind in ("prefill", "decode", "mixed", "empty")}
        self._modelled = Histogram(
            "lorrery_worker_step_modelled_seconds",
            "Device seconds that the step-time model gave a step.",
            buckets=_STEP_BUCKETS + _LONG_STEP_BUCKETS,
            registry=registry,
        )
        parts = Counter(
            "lorrery_worker_step_part_seconds_total",
            "Device seconds of steps by what takes them, as the step-time model divides them.",
            ["kind"],
            registry=registry,
        )
        self._parts = [(name, parts.labels(name)) for name in PARTS]
        self._faults = Counter(
            "lorrery_worker_faults_total",
            "Steps that a fault on request has slowed, or kept from beginning, by kind.",
            ["kind"],
            registry=registry,
        )
        for kind in (SLOW_WORKER, FREEZE_WORKER):
            self._faults.labels(kind)
        self._flops = Counter(
            "lorrery_worker_flops_total", "Floating-point operations of one GPU, modelled.", registry=registry
        )
        self._memory_bytes = Counter(
            "lorrery_worker_memory_bytes_total",
            "Bytes of one GPU's memory read and written, modelled.",
            registry=registry,
        )
        Gauge(
            "lorrery_worker_peak_flops_per_second",
            "Floating-point operations per second of one GPU's data sheet.",
            registry=registry,
        ).set(peak_flops)
        Gauge(
            "lorrery_worker_peak_memory_bytes_per_second",
            "Memory bandwidth of one GPU's data sheet.",
            registry=registry,
        ).set(peak_bytes)
        self._actual = Histogram(
            "lorrery_worker_step_actual_seconds",
            "Device seconds by the wall clock between the ends of two steps, or from its start where a step follows"
            " on none.",
            buckets=_STEP_BUCKETS + _LONG_STEP_BUCKETS,
            registry=registry,
        )
        self._lag = Histogram(
            "lorrery_worker_lag_seconds",
            "Wall seconds between the time a step was due to end and the worker's noticing.",
            buckets=_LAG_BUCKETS,
            registry=registry,
        )
        self._gaps = Counter(
            "lorrery_worker_gaps_total",
            "Steps that started later than the boundary before them, because the worker or its plan was late.",
            registry=registry,
        )
        self._gap_seconds = Counter(
            "lorrery_worker_gap_seconds_total", "Device seconds lost in those gaps.", registry=registry
        )
        self._batch_size = Histogram(
            "lorrery_worker_batch_size", "Sequences in a step.", buckets=_BATCH_BUCKETS, registry=registry
        )
        self._batch_tokens = Histogram(
            "lorrery_worker_batch_tokens", "Tokens computed in a step.", buckets=_TOKEN_BUCKETS, registry=registry
        )
        self._sequences = Gauge("lorrery_worker_running_sequences", "Sequences on the device.", registry=registry)
        self._kv_tokens = Gauge("lorrery_worker_kv_tokens", "Tokens in the KV cache.", registry=registry)
        Gauge("lorrery_worker_kv_pool_tokens", "Tokens that fit in the KV cache.", registry=registry).set(
            kv_pool_tokens
        )
        self._resident = Gauge("lorrery_worker_resident_adapters", "Adapters on the device.", registry=registry)
        self._adapter_loads = Counter(
            "lorrery_worker_adapter_loads_total",
            "Adapters loaded: a plan asked for them and they were not on the device.",
            registry=registry,
        )
        self._output_tokens = Counter("lorrery_worker_output_tokens_total", "Tokens made.", registry=registry)
        self._prefill_tokens = Counter(
            "lorrery_worker_prefill_tokens_total", "Prompt tokens computed.", registry=registry
        )
        self._attached = Gauge(
            "lorrery_worker_attached", "1 while attached to the scheduler, else 0.", registry=registry
        )
        self._attachments = Counter(
            "lorrery_worker_attachments_total", "Times the worker attached to a scheduler.", registry=registry
        )
        self._kv_event_batches = Counter(
            "lorrery_worker_kv_event_batches_total", "Batches of KV events published.", registry=registry
        )
        self._kv_event_replays = Counter(
            "lorrery_worker_kv_event_replays_total", "Requests for batches of KV events again.", registry=registry
        )
        state = Gauge(
            "lorrery_worker_state", "1 for the state that the worker is in, else 0.", ["state"], registry=registry
        )
        self._states = {name: state.labels(name) for name in STATES}
        self._adapters: set[str] = set()
        self.enter("loading")

    def enter(self, state: str) -> None:
        """Enter `state`, one of `STATES`."""
        assert state in STATES
        for name, gauge in self._states.items():
            gauge.set(name == state)

    def attach(self, *, attached: bool) -> None:
        """Note the start or the end of an attachment; nothing is resident at either."""
        self._attached.set(attached)
        if attached:
            self._attachments.inc()
        self._adapters.clear()
        self._resident.set(0)
        self.hold(0, 0)

    def hold(self, num_sequences: int, kv_tokens: int) -> None:
        """Note what is on the device."""
        self._sequences.set(num_sequences)
        self._kv_tokens.set(kv_tokens)

    def fault(self, kind: str) -> None:
        """Note a step that a fault on request has met."""
        self._faults.labels(kind).inc()

    def kv_events_published(self) -> None:
        """Note a batch of KV events."""
        self._kv_event_batches.inc()

    def kv_events_replayed(self) -> None:
        """Note a request for batches again."""
        self._kv_event_replays.inc()

    def adapters_changed(self, loads: Iterable[str], evictions: Iterable[str]) -> None:
        """Note adapters that a plan needs and evicts, evictions first; a resident one costs no load."""
        self._adapters.difference_update(evictions)
        missing = set(loads) - self._adapters
        self._adapters |= missing
        self._adapter_loads.inc(len(missing))
        self._resident.set(len(self._adapters))

    def step_done(
        self,
        batch: Batch,
        cost: StepCost,
        output_tokens: int,
        modelled_ps: int,
        actual_ps: int,
        gap_ps: int,
        lag_seconds: float,
    ) -> None:
        """Note one step.

        Args:
            batch: what it computed.
            cost: where its time goes.
            output_tokens: what it gave.
            modelled_ps: how long it takes.
            actual_ps: how long it took by the wall clock, in device time.
            gap_ps: how much later than the boundary before it began.
            lag_seconds: wall seconds by which its end was noticed late.
        """
        num_prefills, num_decodes = len(batch.prefills), batch.num_decodes
        if num_prefills:
            kind = "mixed" if num_decodes else "prefill"
            prefill_tokens = sum(chunk.new_tokens for chunk in batch.prefills)
            self._prefill_tokens.inc(prefill_tokens)
        else:
            kind = "decode" if num_decodes else "empty"
            prefill_tokens = 0
        self._steps[kind].inc()
        self._batch_size.observe(num_prefills + num_decodes)
        self._batch_tokens.observe(prefill_tokens + num_decodes)
        self._output_tokens.inc(output_tokens)
        self._modelled.observe(modelled_ps / PS_PER_SECOND)
        for name, counter in self._parts:
            if part_ps := getattr(cost, name):
                counter.inc(part_ps / PS_PER_SECOND)
        self._flops.inc(cost.flops)
        self._memory_bytes.inc(cost.num_bytes)
        self._actual.observe(actual_ps / PS_PER_SECOND)
        self._lag.observe(lag_seconds)
        if gap_ps > 0:
            self._gaps.inc()
            self._gap_seconds.inc(gap_ps / PS_PER_SECOND)
