"""A scheduler's counters; `series.py` describes each of them, `gauges.py` shows the current state."""

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Protocol

from prometheus_client import CollectorRegistry

from lorrery.scheduler.core.adapters.loads import Tier
from lorrery.scheduler.core.cluster_facts import Arrived, GaveBack, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import (
    AdapterEvent,
    AdapterLoaded,
    AdapterLost,
    Admitted,
    Cancelled,
    Dropped,
    Evicted,
    Failed,
    Finished,
    FirstToken,
    Handler,
    LoadBegan,
    LoadEnded,
    Preempted,
)
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.refusals import Refusal, RefusalReason
from lorrery.scheduler.core.sequence import Phases, Sequence
from lorrery.scheduler.facts import Decided, InputLate, Stepped
from lorrery.scheduler.liveness import Loss
from lorrery.scheduler.subscribers import series
from lorrery.scheduler.subscribers.history import AdapterTally, count
from lorrery.service.faults.kinds import LOAD_KINDS, WORKER_KINDS
from lorrery.service.settings.sections import MetricsSettings
from lorrery.service.telemetry.series import Exporter, Histogram, Sample, Series
from lorrery.service.telemetry.top_names import TopNames
from lorrery.vocabulary.adapters import AdapterFigures
from lorrery.vocabulary.endings import MEANINGS, CancelCause, FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

MINUTE_SECONDS = 60.0
MAX_TENANTS = 10_000
"""Most tenants counted in one minute; clients may name any if there are no API keys."""


class ServedByTenant:
    """Prompt and output tokens by tenant, of the current minute and the one before, so that memory is bounded.

    Jain's index has the formula of reports (`loadgen/workload/summary.py`). A request counts when it ends.
    """

    def __init__(self) -> None:
        self._minute = 0
        self._now: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def add(self, tenant_id: str, tokens: int, at_seconds: float) -> None:
        """Count the tokens of a request that has ended."""
        self._turn(at_seconds)
        if tenant_id in self._now or len(self._now) < MAX_TENANTS:
            self._now[tenant_id] = self._now.get(tenant_id, 0) + tokens

    def jain_index(self, at_seconds: float) -> float:
        """Return the index; 1 if no tenant got service."""
        self._turn(at_seconds)
        served = [
            self._now.get(tenant, 0) + self._before.get(tenant, 0) for tenant in self._now.keys() | self._before.keys()
        ]
        squares = sum(tokens * tokens for tokens in served)
        return sum(served) ** 2 / (len(served) * squares) if squares else 1.0

    def _turn(self, at_seconds: float) -> None:
        minute = int(at_seconds // MINUTE_SECONDS)
        if minute != self._minute:
            self._before = self._now if minute == self._minute + 1 else {}
            self._now, self._minute = {}, minute


LEVELS = ("gpu", "host")
PHASES = tuple(name.removesuffix("_ps") for name in Phases._fields)
DEFAULT = MetricsSettings()
_PS = float(PS_PER_SECOND)
"""A float: dividing by it costs a third of dividing by the integer."""


class Counted(IntEnum):
    """How much of a request has been counted: each value includes those before it."""

    NOTHING = 0
    ADMISSION = 1
    FIRST_TOKEN = 2


class Life(Protocol):
    """What only a live scheduler knows of a request; see `scheduler.routers.LiveRequest`."""

    counted: Counted
    orphaned: bool

    @property
    def trace_id(self) -> str:
        """Of its spans; empty: they are not kept."""
        ...


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
        lives: what only a live scheduler knows of its requests, by handle.
        limits: how many adapters and tenants have series of their own.

    Attributes:
        served: service to tenants.
        plans: number of plans.
        tally: figures of all adapters since the start.
    """

    def __init__(
        self, registry: CollectorRegistry, lives: Mapping[int, Life], limits: MetricsSettings = DEFAULT
    ) -> None:
        self._lives = lives
        self._num_evictions: dict[Member, int] = {}
        self.served = ServedByTenant()
        shown = self.shown = Exporter(registry, series.TABLE)
        finishes = (reason.word for reason in FinishReason if reason)
        self.requests = shown.numbers(series.REQUESTS, *finishes, "cancelled", "dropped", "refused", "failed")
        self._orphaned = shown.number(series.ORPHANED)
        self._cancels = shown.numbers(series.CANCELS, *(cause.word for cause in MEANINGS))
        self.plans = shown.number(series.PLANS)
        self._late_interrupts = shown.number(series.LATE_INTERRUPTS)
        self._moved = shown.number(series.MOVED)
        self._requeued = shown.number(series.REQUEUED)
        self._preemptions = shown.number(series.PREEMPTIONS)
        self.workers_lost = shown.number(series.WORKERS_LOST)
        self.faults = shown.numbers(series.FAULTS, *sorted(LOAD_KINDS), *sorted(WORKER_KINDS))
        self.workers_given_up = shown.numbers(series.WORKERS_GIVEN_UP, *Loss)
        self._prompt_tokens = shown.number(series.PROMPT_TOKENS)
        self._output_tokens = shown.number(series.OUTPUT_TOKENS)
        self._prefix_queries = shown.number(series.PREFIX_QUERIES)
        self._prefix_hits = shown.number(series.PREFIX_HITS)
        self._prefix_evictions = shown.number(series.PREFIX_EVICTIONS)
        self._gap_seconds = shown.number(series.GAPS)
        self.queue_seconds = shown.histogram(series.QUEUE)
        self.ttft_seconds = shown.histogram(series.TTFT)
        phases = shown.histograms(series.REQUEST_PHASE, *PHASES)
        self._phases = [phases.labels(name) for name in PHASES]
        step_seconds = shown.histograms(series.STEP, "prefill", "decode")
        self._prefill_seconds, self._decode_seconds = step_seconds.labels("prefill"), step_seconds.labels("decode")
        self._batch_size = shown.histogram(series.BATCH_SIZE)
        self._batch_tokens = shown.histogram(series.BATCH_TOKENS)
        self._plan_seconds = shown.histogram(series.PLAN_CPU)
        self._commit_seconds = shown.histogram(series.COMMIT_CPU)
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

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {
            Arrived: self._arrived,
            Placed: self._placed,
            Refused: self._refused,
            Withdrawn: self._withdrawn,
            Admitted: self._admitted,
            FirstToken: self._first_token,
            Preempted: self._preempted,
            Finished: self._finished,
            Cancelled: self._cancelled,
            Dropped: self._dropped,
            Failed: self._failed,
            GaveBack: self._gave_back,
            InputLate: self._input_late,
            Decided: self._decided,
            Stepped: self._stepped,
            LoadBegan: self._adapter_changed,
            LoadEnded: self._load_ended,
            Evicted: self._evicted,
            AdapterLost: self._adapter_changed,
            AdapterLoaded: self._adapter_loaded,
        }

    # --- requests ---------------------------------------------------------------------------------------------------

    def _arrived(self, fact: Arrived, at_ps: int, member: Member | None) -> None:
        """Count a request, even if refused, as traffic of its adapter, if any, and its tenant."""
        adapter = fact.sequence.adapter
        if adapter is not None:
            self.adapters.count(adapter.adapter_id)
        self.tenants.count(fact.sequence.tenant_id)

    def _placed(self, fact: Placed, at_ps: int, member: Member | None) -> None:
        if fact.moved_from:
            self._moved.inc()

    def _refused(self, fact: Refused, at_ps: int, member: Member | None) -> None:
        self.refused(fact.refusal)
        if not fact.on_arrival:
            self._serve(fact.sequence, fact.sequence.produced_tokens, at_ps)

    def refused(self, refusal: Refusal, outcome: str = "refused") -> None:
        """Count a request that ends without (further) tokens."""
        failed = refusal.reason in (RefusalReason.INTERNAL, RefusalReason.WORKERS_LOST)
        self.requests.labels("failed" if failed else outcome).inc()

    def _withdrawn(self, fact: Withdrawn, at_ps: int, member: Member | None) -> None:
        if fact.refusal is not None:
            self.refused(fact.refusal, "dropped")

    def _admitted(self, fact: Admitted, at_ps: int, member: Member | None) -> None:
        """Record a request's first admission, and its look-up in the prefix cache."""
        sequence = fact.sequence
        live = self._lives.get(sequence.handle)
        if live is not None and live.counted >= Counted.ADMISSION:
            return
        if fact.first and sequence.first_admitted_ps is not None:
            seconds, adapter = (sequence.first_admitted_ps - sequence.arrived_ps) / _PS, sequence.adapter
            self.queue_seconds.observe(seconds)
            self.adapters.of("" if adapter is None else adapter.adapter_id).queue.observe(seconds)
            self.tenants.of(sequence.tenant_id).queue.observe(seconds)
            self._prompt_tokens.inc(sequence.prompt_tokens)
            if live is not None and live.trace_id:
                self.queue_seconds.exemplify(seconds, live.trace_id)
        if fact.queried_tokens:
            self._prefix_queries.inc(fact.queried_tokens)
            self._prefix_hits.inc(sequence.cached_tokens)

    def _first_token(self, fact: FirstToken, at_ps: int, member: Member | None) -> None:
        live = self._lives.get(fact.sequence.handle)
        if live is None or (live.counted < Counted.FIRST_TOKEN and not live.orphaned):
            self.ttft_seconds.observe((fact.at_ps - fact.sequence.arrived_ps) / _PS)

    def _preempted(self, fact: Preempted, at_ps: int, member: Member | None) -> None:
        self._preemptions.inc()

    def _finished(self, fact: Finished, at_ps: int, member: Member | None) -> None:
        sequence = fact.sequence
        self.requests.labels(fact.reason.word).inc()
        for histogram, phase_ps in zip(self._phases, sequence.phases(fact.at_ps), strict=True):
            histogram.observe(phase_ps / _PS)
        withdrawal = sequence.withdrawal
        if withdrawal is not None and withdrawal.cause.finish is fact.reason:  # and not by itself, in the meantime
            self._cancels.labels(withdrawal.cause.word).inc()
        self._serve(sequence, fact.output_tokens, at_ps)

    def _cancelled(self, fact: Cancelled, at_ps: int, member: Member | None) -> None:
        """Count a cancelled request that has not finished."""
        withdrawal = fact.sequence.withdrawal
        if withdrawal is not None and not withdrawal.by_scheduler:
            cause = withdrawal.cause
            self._cancels.labels(cause.word).inc()
            outcome = MEANINGS[cause].outcome
            if outcome:
                self.requests.labels(outcome).inc()
            elif cause is CancelCause.ROUTER_LEFT:
                self._orphaned.inc()
        self._serve(fact.sequence, fact.output_tokens, at_ps)

    def _dropped(self, fact: Dropped, at_ps: int, member: Member | None) -> None:
        self.requests.labels("dropped").inc()
        self._serve(fact.sequence, fact.sequence.produced_tokens, at_ps)

    def _failed(self, fact: Failed, at_ps: int, member: Member | None) -> None:
        self.requests.labels("failed").inc()
        self._serve(fact.sequence, fact.output_tokens, at_ps)

    def _serve(self, sequence: Sequence, output_tokens: int, at_ps: int) -> None:
        """Count the service to a tenant by a request that has ended, if it was admitted."""
        if sequence.first_admitted_ps is not None:
            use = self.tenants.of(sequence.tenant_id)
            use.prompt_tokens += sequence.prompt_tokens
            use.output_tokens += output_tokens
            self.served.add(sequence.tenant_id, sequence.prompt_tokens + output_tokens, at_ps / PS_PER_SECOND)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _input_late(self, fact: InputLate, at_ps: int, member: Member | None) -> None:
        if not fact.never:
            self._late_interrupts.inc()

    def _decided(self, fact: Decided, at_ps: int, member: Member | None) -> None:
        self._plan_seconds.observe(fact.cpu_seconds)
        if isinstance(fact.decision, Plan):
            self.plans.inc()
        self._evict_blocks(member)

    def _stepped(self, fact: Stepped, at_ps: int, member: Member | None) -> None:
        self.ran(fact.plan, fact.step.ran.end_ps - fact.step.start_ps, fact.num_tokens, member)
        self._commit_seconds.observe(fact.cpu_seconds)
        if fact.gap_ps:
            self._gap_seconds.inc(fact.gap_ps / _PS)

    def ran(self, plan: Plan, step_ps: int, num_tokens_out: int, member: Member | None) -> None:
        """Count a step of a plan."""
        seconds = self._decode_seconds if plan.decode else self._prefill_seconds
        seconds.observe(step_ps / _PS)
        num_tokens = num_tokens_out if plan.decode else 0
        if plan.prefills:
            num_tokens += sum([chunk.new_tokens - (chunk.samples and plan.decode) for chunk in plan.prefills])
        self._batch_tokens.observe(num_tokens)
        self._batch_size.observe(num_tokens_out)
        self._output_tokens.inc(num_tokens_out)
        self._evict_blocks(member)

    def _evict_blocks(self, member: Member | None) -> None:
        """Count what a worker's prefix cache has evicted since the last call."""
        cache = None if member is None else member.replica.prefix_cache
        if member is not None and cache is not None:
            before, self._num_evictions[member] = self._num_evictions.get(member, 0), cache.num_evictions
            self._prefix_evictions.inc(cache.num_evictions - before)

    # --- workers and adapters ---------------------------------------------------------------------------------------

    def _gave_back(self, fact: GaveBack, at_ps: int, member: Member | None) -> None:
        if fact.lost:
            self._evict_blocks(fact.member)
            self._num_evictions.pop(fact.member, None)
            self._requeued.inc(len(fact.sequences))

    def _adapter_loaded(self, fact: AdapterLoaded, at_ps: int, member: Member | None) -> None:
        self.adapters.foresee((fact.adapter_id,))

    def _adapter_changed(self, fact: AdapterEvent, at_ps: int, member: Member | None) -> None:
        self.tally.count(fact)
        count(self.adapters.of(fact.adapter.adapter_id).figures, fact)

    def _load_ended(self, fact: LoadEnded, at_ps: int, member: Member | None) -> None:
        self._adapter_changed(fact, at_ps, member)
        self._loads.labels(fact.tier, "failed" if fact.failed else "ok").inc()
        self._load_seconds.labels(fact.tier).observe(fact.took_ps / _PS)

    def _evicted(self, fact: Evicted, at_ps: int, member: Member | None) -> None:
        self._adapter_changed(fact, at_ps, member)
        self._evictions.labels(fact.level).inc()
