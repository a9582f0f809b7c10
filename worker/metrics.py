"""The metrics of a worker: their series, and the counting of its steps.

Durations of steps and gaps are device seconds, lags are wall seconds.

Counting a step updates several counters and histograms and evaluates the step-time formula again. While a worker sleeps
until the next step ends, other processes evict its cache lines, so the first step counted after a sleep costs several
times what the second one does. Each finished step is therefore kept as one record, and records are counted together
when nothing is urgent: after `COUNT_AFTER` of them, at a heartbeat, and at the end of a plan. The metrics may lag
behind what the scheduler knows by that much.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from lorrery.service.faults.kinds import FREEZE_WORKER, SLOW_WORKER
from lorrery.service.telemetry.series import Exporter, Series, table
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import PARTS, Batch, PrefillWork, StepCost, StepOutcome
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.steptime import Spells
from lorrery.worker.engine_metrics import Engine

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


STATES = ("loading", "dialling", "attached", "draining")


class WorkerMetrics:
    """The worker's metrics, all present from the start.

    Args:
        registry: where they are registered.
        name: name of the worker, the label `worker` of all its metrics.
        kv_pool_tokens: size of the KV pool.
        gpu: name of the GPU in the catalogue.
        model: name of the model.
        tensor_parallel: GPUs that the worker stands for.
        peak_flops: FLOP per second of one GPU, from its data sheet.
        peak_bytes: memory bytes per second of one GPU, from its data sheet.
        engine: metrics under other engines' names; None: off.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        kv_pool_tokens: int,
        *,
        gpu: str = "",
        model: str = "",
        tensor_parallel: int = 1,
        peak_flops: float = 0.0,
        peak_bytes: float = 0.0,
        engine: Engine | None = None,
    ) -> None:
        self._engine = engine
        shown = Exporter(registry, TABLE, dict.fromkeys(CONSTANT_LABELS, name))
        shown.numbers(INFO).labels(gpu, model, str(tensor_parallel)).set(1)
        steps = shown.numbers(STEPS)
        self._steps = {kind: steps.labels(kind) for kind in ("prefill", "decode", "mixed", "empty")}
        self._modelled = shown.histogram(STEP_MODELLED)
        parts = shown.numbers(STEP_PARTS)
        self._parts = [(part, parts.labels(part)) for part in PARTS]
        self._faults = shown.numbers(FAULTS, SLOW_WORKER, FREEZE_WORKER)
        self._flops = shown.number(FLOPS)
        self._memory_bytes = shown.number(MEMORY_BYTES)
        shown.number(PEAK_FLOPS).set(peak_flops)
        shown.number(PEAK_BYTES).set(peak_bytes)
        self._actual = shown.histogram(STEP_ACTUAL)
        self._lag = shown.histogram(LAG)
        self._gaps = shown.number(GAPS)
        self._gap_seconds = shown.number(GAP_SECONDS)
        self._batch_size = shown.histogram(BATCH_SIZE)
        self._batch_tokens = shown.histogram(BATCH_TOKENS)
        self._sequences = shown.number(RUNNING)
        self._kv_tokens = shown.number(KV_TOKENS)
        shown.number(KV_POOL).set(kv_pool_tokens)
        self._resident = shown.number(RESIDENT)
        self._adapter_loads = shown.number(ADAPTER_LOADS)
        self._output_tokens = shown.number(OUTPUT_TOKENS)
        self._prefill_tokens = shown.number(PREFILL_TOKENS)
        self._attached = shown.number(ATTACHED)
        self._attachments = shown.number(ATTACHMENTS)
        self._kv_event_batches = shown.number(KV_EVENT_BATCHES)
        self._kv_event_replays = shown.number(KV_EVENT_REPLAYS)
        state = shown.numbers(STATE)
        self._states = {name: state.labels(name) for name in STATES}
        self._adapters: set[str] = set()
        self.enter("loading")

    def enter(self, state: str) -> None:
        """Enter `state`, one of `STATES`."""
        assert state in STATES
        for name, gauge in self._states.items():
            gauge.set(name == state)

    def attach(self, *, attached: bool) -> None:
        """Record the start or the end of an attachment; no adapter is resident at either."""
        self._attached.set(attached)
        if attached:
            self._attachments.inc()
        self._adapters.clear()
        self._resident.set(0)
        if self._engine is not None:
            self._engine.attach(attached=attached)
        self.hold(0, 0)

    def hold(self, num_sequences: int, kv_tokens: int) -> None:
        """Set the gauges of what is on the device."""
        self._sequences.set(num_sequences)
        self._kv_tokens.set(kv_tokens)

    def fault(self, kind: str) -> None:
        """Count a step that an injected fault slowed or held back."""
        self._faults.labels(kind).inc()

    def kv_events_published(self) -> None:
        """Count a published batch of KV events."""
        self._kv_event_batches.inc()

    def kv_events_replayed(self) -> None:
        """Count a request to replay batches of KV events."""
        self._kv_event_replays.inc()

    def adapters_changed(self, loads: Iterable[str], evictions: Iterable[str]) -> None:
        """Record the adapters that a plan evicts and needs, evictions first; a resident adapter needs no load."""
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
        num_sampled: int = 0,
        num_joined: int = 0,
    ) -> None:
        """Count one step.

        Args:
            batch: what the step computed.
            cost: its modelled time by part.
            output_tokens: tokens that it produced.
            modelled_ps: modelled duration.
            actual_ps: duration by the wall clock, in device time.
            gap_ps: time between the previous boundary and the start of the step.
            lag_seconds: wall seconds between the end of the step and the moment the worker noticed it.
            num_sampled: sequences whose prefill ended in this step, each with a token.
            num_joined: of these, the sequences that go on to decode.
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
        self._cost(cost)
        self._actual.observe(actual_ps / PS_PER_SECOND)
        self._lag.observe(lag_seconds)
        if self._engine is not None:
            self._engine.stepped(prefill_tokens, output_tokens, num_sampled, num_joined, modelled_ps + gap_ps)
        if gap_ps > 0:
            self._gap(gap_ps)

    def decodes_done(
        self,
        num_decodes: int,
        cost: StepCost,
        modelled_ps: Sequence[int],
        actual_ps: Sequence[int],
        gaps_ps: Sequence[int],
        lag_seconds: Sequence[float],
    ) -> None:
        """Count consecutive steps that decoded the same sequences, each of which got a token; see `step_done`.

        Args:
            num_decodes: sequences in each step.
            cost: duration of all steps together, by part.
            modelled_ps: duration of each step by the model.
            actual_ps: duration of each step by the wall clock.
            gaps_ps: time before each step in which nothing ran.
            lag_seconds: wall seconds between the end of each step and the moment the worker noticed it.
        """
        num_steps = len(modelled_ps)
        self._steps["decode"].inc(num_steps)
        self._batch_size.observe_many(num_decodes, num_steps)
        self._batch_tokens.observe_many(num_decodes, num_steps)
        self._output_tokens.inc(num_decodes * num_steps)
        self._modelled.observe_each([one_ps / PS_PER_SECOND for one_ps in modelled_ps])
        self._actual.observe_each([one_ps / PS_PER_SECOND for one_ps in actual_ps])
        self._lag.observe_each(lag_seconds)
        self._cost(cost)
        if any(gaps_ps):
            for gap_ps in filter(None, gaps_ps):
                self._gap(gap_ps)
            modelled_ps = list(map(sum, zip(modelled_ps, gaps_ps, strict=True)))
        if self._engine is not None:
            self._engine.decoded(num_decodes, modelled_ps)

    def _cost(self, cost: StepCost) -> None:
        for name, counter in self._parts:
            if part_ps := getattr(cost, name):
                counter.inc(part_ps / PS_PER_SECOND)
        self._flops.inc(cost.flops)
        self._memory_bytes.inc(cost.num_bytes)

    def _gap(self, gap_ps: int) -> None:
        self._gaps.inc()
        self._gap_seconds.inc(gap_ps / PS_PER_SECOND)


COUNT_AFTER = 64
"""Steps kept before they are counted, about one second's worth."""


class StepRecord(NamedTuple):
    """A finished step.

    Attributes:
        batch: what the step computed.
        prefills: prefill chunks of its plan; the batch of a later step has none of them.
        outcome: tokens and finishes of the step.
        gap_ps: time between the previous boundary and the start of the step.
        start_ps: start of the step.
        end_ps: end of the step.
        actual_ps: duration by the wall clock, in device time.
        lag_seconds: wall seconds between the end of the step and the moment the worker noticed it.
    """

    batch: Batch
    prefills: tuple[PrefillWork, ...]
    outcome: StepOutcome
    gap_ps: int
    start_ps: int
    end_ps: int
    actual_ps: int
    lag_seconds: float


class StepAccounts:
    """Steps of one GPU that are not counted yet.

    Most steps decode the same sequences as the step before. Such a run is counted at little more than the cost of one
    step: if the durations of its steps grow evenly, so does each part of them, and the first and the last step give the
    sums.

    Args:
        gpu: the GPU that runs the steps.
        metrics: where steps are counted.
        spells: times at which steps take longer; count all finished steps before replacing it.

    Attributes:
        due: whether enough steps are recorded to count them.
    """

    def __init__(self, gpu: MockGpu, metrics: WorkerMetrics, spells: Spells) -> None:
        self._gpu, self._metrics = gpu, metrics
        self.spells = spells
        self._records: list[StepRecord] = []
        self.due = False

    def ended(self, record: StepRecord, *, last: bool) -> None:
        """Record a finished step; the last step of a plan makes all recorded steps due for counting."""
        self._records.append(record)
        if last or len(self._records) >= COUNT_AFTER:
            self.due = True

    def count(self) -> None:
        """Count all recorded steps, and set the gauges to what is on the device now."""
        self.due = False
        records, self._records = self._records, []
        for run in _runs(records):
            if len(run) == 1 or self.spells.slows or not self._count_run(run):
                for record in run:
                    self._count(record)
        self._metrics.hold(len(self._gpu), self._gpu.kv_tokens)

    def _count_run(self, run: Sequence[StepRecord]) -> bool:
        """Count a run of steps at once if their durations grow evenly; return whether they do."""
        batch, num_steps = run[0].batch, len(run)
        first, last = self._gpu.step_cost(batch), self._gpu.step_cost(run[-1].batch)
        modelled_ps = [record.end_ps - record.start_ps for record in run]
        if 2 * sum(modelled_ps) != num_steps * (first.total_ps + last.total_ps):
            return False
        self._metrics.decodes_done(
            batch.num_decodes,
            first.plus_up_to(last, num_steps),
            modelled_ps,
            [record.actual_ps for record in run],
            [record.gap_ps for record in run],
            [record.lag_seconds for record in run],
        )
        return True

    def _count(self, record: StepRecord) -> None:
        cost = self._gpu.step_cost(record.batch)
        slow_ps = self.spells.stretch(cost.total_ps, record.start_ps - record.gap_ps) - cost.total_ps
        if slow_ps:
            self._metrics.fault(SLOW_WORKER)
            cost = replace(cost, whole=cost.whole + slow_ps)
        num_sampled = num_joined = 0
        if record.prefills and record.batch.prefills:
            finished = {handle for handle, _ in record.outcome.finished}
            sampled = [work.handle for work in record.prefills if work.samples]
            num_sampled, num_joined = len(sampled), sum(handle not in finished for handle in sampled)
        self._metrics.step_done(
            record.batch,
            cost,
            len(record.outcome.handles),
            record.end_ps - record.start_ps,
            record.actual_ps,
            record.gap_ps,
            record.lag_seconds,
            num_sampled,
            num_joined,
        )


def _runs(records: Sequence[StepRecord]) -> Iterator[Sequence[StepRecord]]:
    """Split steps into runs that only decode the same sequences; any other step is alone."""
    first = 0
    for index in range(1, len(records) + 1):
        if index == len(records) or not _go_on(records[index - 1], records[index]):
            yield records[first:index]
            first = index


def _go_on(one: StepRecord, other: StepRecord) -> bool:
    """Return whether a step decodes exactly the sequences of the step before, and each gets a token in both."""
    before, after, num = one.batch, other.batch, other.batch.num_decodes
    return (
        before.num_decodes == num == len(one.outcome.handles) == len(other.outcome.handles)
        and after.decode_kv_tokens == before.decode_kv_tokens + num
        and after.max_decode_kv_tokens == before.max_decode_kv_tokens + 1
        and after.lora is before.lora
        and not before.prefills
        and not after.prefills
    )
