"""The metrics of a worker; `series.py` describes each of them."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry

from lorrery.service.faults.kinds import FREEZE_WORKER, SLOW_WORKER
from lorrery.service.telemetry.series import Exporter
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker import series
from lorrery.worker.device.batch import PARTS, Batch, StepCost
from lorrery.worker.engine import Engine

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
        shown = Exporter(registry, series.TABLE, dict.fromkeys(series.CONSTANT_LABELS, name))
        shown.numbers(series.INFO).labels(gpu, model, str(tensor_parallel)).set(1)
        steps = shown.numbers(series.STEPS)
        self._steps = {kind: steps.labels(kind) for kind in ("prefill", "decode", "mixed", "empty")}
        self._modelled = shown.histogram(series.STEP_MODELLED)
        parts = shown.numbers(series.STEP_PARTS)
        self._parts = [(part, parts.labels(part)) for part in PARTS]
        self._faults = shown.numbers(series.FAULTS, SLOW_WORKER, FREEZE_WORKER)
        self._flops = shown.number(series.FLOPS)
        self._memory_bytes = shown.number(series.MEMORY_BYTES)
        shown.number(series.PEAK_FLOPS).set(peak_flops)
        shown.number(series.PEAK_BYTES).set(peak_bytes)
        self._actual = shown.histogram(series.STEP_ACTUAL)
        self._lag = shown.histogram(series.LAG)
        self._gaps = shown.number(series.GAPS)
        self._gap_seconds = shown.number(series.GAP_SECONDS)
        self._batch_size = shown.histogram(series.BATCH_SIZE)
        self._batch_tokens = shown.histogram(series.BATCH_TOKENS)
        self._sequences = shown.number(series.RUNNING)
        self._kv_tokens = shown.number(series.KV_TOKENS)
        shown.number(series.KV_POOL).set(kv_pool_tokens)
        self._resident = shown.number(series.RESIDENT)
        self._adapter_loads = shown.number(series.ADAPTER_LOADS)
        self._output_tokens = shown.number(series.OUTPUT_TOKENS)
        self._prefill_tokens = shown.number(series.PREFILL_TOKENS)
        self._attached = shown.number(series.ATTACHED)
        self._attachments = shown.number(series.ATTACHMENTS)
        self._kv_event_batches = shown.number(series.KV_EVENT_BATCHES)
        self._kv_event_replays = shown.number(series.KV_EVENT_REPLAYS)
        state = shown.numbers(series.STATE)
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
