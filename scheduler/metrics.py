"""A scheduler's counters; `series.py` describes each of them, `gauges.py` shows the current state."""

from collections.abc import Callable, Collection, Iterable

from prometheus_client import CollectorRegistry

from lorrery.scheduler import series
from lorrery.scheduler.core.adapter_events import AdapterEvent, Evicted, LoadEnded
from lorrery.scheduler.core.adapter_loads import Tier
from lorrery.scheduler.core.adapter_tally import AdapterTally, count
from lorrery.scheduler.core.phases import Phases
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.watch import Loss
from lorrery.service.faults.kinds import LOAD_KINDS, WORKER_KINDS
from lorrery.service.settings.sections import MetricsSettings
from lorrery.service.telemetry.histogram import Histogram
from lorrery.service.telemetry.series import Exporter, Sample, Series
from lorrery.service.telemetry.top_names import TopNames
from lorrery.vocabulary.adapter_figures import AdapterFigures
from lorrery.vocabulary.cancel_cause import MEANINGS, CancelCause
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

LEVELS = ("gpu", "host")
PHASES = tuple(name.removesuffix("_ps") for name in Phases._fields)
DEFAULT = MetricsSettings()
_PS = float(PS_PER_SECOND)
"""A float: dividing by it costs a third of dividing by the integer."""


class AdapterUse:
    """Loads and queue times of one adapter in this scheduler."""

    __slots__ = ("figures", "queue")

    def __init__(self) -> None:
        self.figures = AdapterFigures()
        self.queue = Histogram(series.ADAPTER_QUEUE.buckets)


class TenantUse:
    """Service that one tenant got."""

    __slots__ = ("output_tokens", "prompt_tokens", "queue")

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.queue = Histogram(series.TENANT_QUEUE.buckets)


class SchedulerMetrics:
    """All counters of one scheduler; make one per process.

    Args:
        registry: where they are shown.
        limits: how many adapters and tenants have series of their own.

    Attributes:
        tally: figures of all adapters since the start.
    """

    def __init__(self, registry: CollectorRegistry, limits: MetricsSettings = DEFAULT) -> None:
        shown = self.shown = Exporter(registry, series.TABLE)
        finishes = (reason.word for reason in FinishReason if reason)
        self.requests = shown.numbers(series.REQUESTS, *finishes, "cancelled", "dropped", "refused", "failed")
        self.orphaned = shown.number(series.ORPHANED)
        self.cancels = shown.numbers(series.CANCELS, *(cause.word for cause in MEANINGS))
        self.plans = shown.number(series.PLANS)
        self.late_interrupts = shown.number(series.LATE_INTERRUPTS)
        self.moved = shown.number(series.MOVED)
        self.requeued = shown.number(series.REQUEUED)
        self.preemptions = shown.number(series.PREEMPTIONS)
        self.workers_lost = shown.number(series.WORKERS_LOST)
        self.faults = shown.numbers(series.FAULTS, *sorted(LOAD_KINDS), *sorted(WORKER_KINDS))
        self.workers_given_up = shown.numbers(series.WORKERS_GIVEN_UP, *Loss)
        self.prompt_tokens = shown.number(series.PROMPT_TOKENS)
        self.output_tokens = shown.number(series.OUTPUT_TOKENS)
        self.prefix_queries = shown.number(series.PREFIX_QUERIES)
        self.prefix_hits = shown.number(series.PREFIX_HITS)
        self.prefix_evictions = shown.number(series.PREFIX_EVICTIONS)
        self.gap_seconds = shown.number(series.GAPS)
        self.queue_seconds = shown.histogram(series.QUEUE)
        self.ttft_seconds = shown.histogram(series.TTFT)
        phases = shown.histograms(series.REQUEST_PHASE, *PHASES)
        self._phases = [phases.labels(name) for name in PHASES]
        step_seconds = shown.histograms(series.STEP, "prefill", "decode")
        self._prefill_seconds, self._decode_seconds = step_seconds.labels("prefill"), step_seconds.labels("decode")
        self.batch_size = shown.histogram(series.BATCH_SIZE)
        self.batch_tokens = shown.histogram(series.BATCH_TOKENS)
        self.plan_seconds = shown.histogram(series.PLAN_CPU)
        self.commit_seconds = shown.histogram(series.COMMIT_CPU)
        tiers = [tier.value for tier in Tier]
        self._loads = shown.numbers(series.ADAPTER_LOADS)
        for tier in tiers:
            for outcome in ("ok", "failed"):
                self._loads.labels(tier, outcome)
        self._load_seconds = shown.histograms(series.ADAPTER_LOAD, *tiers)
        self._evictions = shown.numbers(series.ADAPTER_EVICTIONS, *LEVELS)
        adapters = self.adapters = TopNames(limits.max_adapters, AdapterUse, "base")
        shown.read(series.ADAPTER_QUEUE, lambda: [((label,), use.queue) for label, use in adapters.shown()])
        self.tally = AdapterTally()
        self._by_adapter(series.LOADS_BY_ADAPTER, lambda figures: figures.num_loads)
        self._by_adapter(series.FAILED_LOADS_BY_ADAPTER, lambda figures: figures.num_failed_loads)
        self._by_adapter(series.EVICTIONS_BY_ADAPTER, lambda figures: figures.num_evictions)
        self._by_adapter(series.ADAPTER_THRASH, lambda figures: figures.num_thrashes)
        self._by_adapter(series.ADAPTER_RESIDENT_SECONDS, lambda figures: figures.resident_ps / _PS)
        shown.read(series.LOAD_SECONDS_BY_ADAPTER, self._load_seconds_by_adapter)
        tenants = self.tenants = TopNames(limits.max_tenants, TenantUse, "none")
        shown.read(series.TENANT_QUEUE, lambda: [((label,), use.queue) for label, use in tenants.shown()])
        shown.read(series.TENANT_SERVICE_TOKENS, self._service_tokens)

    def _by_adapter(self, of: Series, read: Callable[[AdapterFigures], float]) -> None:
        self.shown.read(of, lambda: [((label,), read(use.figures)) for label, use in self.adapters.shown()])

    def _load_seconds_by_adapter(self) -> Iterable[Sample]:
        for label, use in self.adapters.shown():
            yield (label, "host"), use.figures.host_load_ps / _PS
            yield (label, "disk"), use.figures.disk_load_ps / _PS

    def _service_tokens(self) -> Iterable[Sample]:
        for label, use in self.tenants.shown():
            yield (label, "prompt"), use.prompt_tokens
            yield (label, "output"), use.output_tokens

    # --- requests ---------------------------------------------------------------------------------------------------

    def arrived(self, adapter: Adapter | None, tenant_id: str) -> None:
        """Count a request, even if refused, as traffic of its adapter, if any, and its tenant."""
        if adapter is not None:
            self.adapters.count(adapter.adapter_id)
        self.tenants.count(tenant_id)

    def admitted(self, sequence: Sequence, queue_ps: int) -> None:
        """Record a request's first admission."""
        seconds, adapter = queue_ps / _PS, sequence.adapter
        self.queue_seconds.observe(seconds)
        self.adapters.of("" if adapter is None else adapter.adapter_id).queue.observe(seconds)
        self.tenants.of(sequence.tenant_id).queue.observe(seconds)
        self.prompt_tokens.inc(sequence.prompt_tokens)

    def prefix_looked_up(self, queried_tokens: int, cached_tokens: int) -> None:
        """Record a request's look-up in the prefix cache, at its first admission."""
        self.prefix_queries.inc(queried_tokens)
        self.prefix_hits.inc(cached_tokens)

    def first_token(self, ttft_ps: int) -> None:
        """Record a request's first token."""
        self.ttft_seconds.observe(ttft_ps / _PS)

    def cancelled(self, cause: CancelCause) -> None:
        """Count a cancelled request that has not finished."""
        self.cancels.labels(cause.word).inc()
        outcome = MEANINGS[cause].outcome
        if outcome:
            self.requests.labels(outcome).inc()
        elif cause is CancelCause.ROUTER_LEFT:
            self.orphaned.inc()

    def finished(self, reason: FinishReason, phases: Phases) -> None:
        """Record a request that ended by itself."""
        self.requests.labels(reason.word).inc()
        for histogram, phase_ps in zip(self._phases, phases, strict=True):
            histogram.observe(phase_ps / _PS)

    def served(self, tenant_id: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count the service to a tenant by a request that was admitted and has ended."""
        use = self.tenants.of(tenant_id)
        use.prompt_tokens += prompt_tokens
        use.output_tokens += output_tokens

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, plan: Plan, step_ps: int, gap_ps: int, num_tokens_out: int, cpu_seconds: float) -> None:
        """Record one step of a plan.

        Args:
            plan: that it belongs to.
            step_ps: its duration.
            gap_ps: how long the worker stood still before it.
            num_tokens_out: tokens that it produced.
            cpu_seconds: CPU time of the core to commit it.
        """
        (self._decode_seconds if plan.decode else self._prefill_seconds).observe(step_ps / _PS)
        num_tokens = num_tokens_out if plan.decode else 0
        if plan.prefills:
            num_tokens += sum([chunk.new_tokens - (chunk.samples and plan.decode) for chunk in plan.prefills])
        self.batch_tokens.observe(num_tokens)
        self.batch_size.observe(num_tokens_out)
        self.commit_seconds.observe(cpu_seconds)
        self.output_tokens.inc(num_tokens_out)
        if gap_ps:
            self.gap_seconds.inc(gap_ps / _PS)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def adapters_changed(self, events: Collection[AdapterEvent]) -> None:
        """Record the events of a worker's adapters."""
        self.tally.record(events)
        for event in events:
            count(self.adapters.of(event.adapter.adapter_id).figures, event)
            if isinstance(event, Evicted):
                self._evictions.labels(event.level).inc()
            elif isinstance(event, LoadEnded):
                self._loads.labels(event.tier, "failed" if event.failed else "ok").inc()
                self._load_seconds.labels(event.tier).observe(event.took_ps / _PS)
