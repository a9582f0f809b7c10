"""A simulation's record: the frames that a watcher of the same cluster would have seen live.

Frames show the state at fixed times. A worker's jump is committed up to the steps that have ended by then, which by
the law of the core changes nothing later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorrery.scheduler.core.cluster_facts import GaveBack
from lorrery.scheduler.core.facts import Handler
from lorrery.scheduler.subscribers.frames import CoreFrame, Tables, Watcher, WorkerSnapshot
from lorrery.scheduler.subscribers.frames import EndedRow as CoreEnded
from lorrery.service.installed import VERSION
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import RunBegan, StepSpan
from lorrery.view.frame import (
    NO_WORKER,
    AdapterRow,
    EndedRow,
    EventRow,
    FaultRow,
    Frame,
    Hello,
    MissingRow,
    ObjectiveRow,
    ResidentRow,
    RunningRow,
    Shard,
    TenantRow,
    Totals,
    Worker,
    event_kind,
    kind_of,
)
from lorrery.view.record import Recorder
from lorrery.vocabulary.objectives import BUDGETS, TPOT_SECONDS, TTFT_SECONDS
from lorrery.vocabulary.units import PS_PER_SECOND

_TOTALS = Totals.__struct_fields__
_COUNTED = frozenset({
    *("finished", "timed out", "dropped", "queue full", "no adapter", "no worker", "draining", "failed", "faulted"),
})  # fmt: skip
"""Outcomes that count towards the objective `served`; the live cluster's are in `vocabulary.objectives`."""


@dataclass(slots=True)
class _Run:
    """Counters of a worker: output tokens, time in steps, and duration of its last step."""

    num_tokens: int = 0
    busy_ps: int = 0
    step_ps: int = 0


class FrameRecorder:
    """Records a simulation; a subscriber of it, which also takes its requests as they end.

    Args:
        simulation: not run yet, apart from its warm-up.
        model: the base model's name.
        gpus: by worker, its GPU's name and its number of GPUs.
        addresses: of its schedulers.
        active_faults: returns the rules of the faults that are on at a time.
        every_seconds: device seconds between two frames; None: chosen by `Recorder`.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        model: str,
        gpus: Mapping[str, tuple[str, int]],
        addresses: Sequence[str],
        active_faults: Callable[[int], Sequence[str]],
        every_seconds: float | None = None,
    ) -> None:
        self._simulation = simulation
        self._model, self._gpus = model, gpus
        self._active_faults = active_faults
        self._objectives = {name: [0, 0] for name in BUDGETS}
        self._shards = [Shard(address, connected=True) for address in addresses]
        self._recorder = Recorder(every_seconds)
        self._runs: dict[str, _Run] = {}
        self._tables = Tables()
        self._watchers = [Watcher(history, self._tables) for history in simulation.keep_histories()]
        self._start_ps = simulation.now_ps
        simulation.tick(self._start_ps, self._take)

    # --- what runs --------------------------------------------------------------------------------------------------

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {RunBegan: self._begin, StepSpan: self._ran, GaveBack: self._gave_back}

    def _begin(self, fact: RunBegan, at_ps: int, member: object) -> None:
        """Set the origin of times."""
        self._start_ps = at_ps

    def _ran(self, span: StepSpan, at_ps: int, member: object) -> None:
        """Count these steps."""
        run = self._runs.get(span.worker)
        if run is None:
            run = self._runs[span.worker] = _Run()
        run.num_tokens += span.num_steps * span.num_decodes - len(span.silent)
        run.num_tokens += sum([chunk.samples for chunk in span.plan.prefills])
        run.busy_ps += span.end_ps - span.start_ps
        run.step_ps = span.first_ps + (span.num_steps - 1) * span.slope_ps

    def _gave_back(self, fact: GaveBack, at_ps: int, member: object) -> None:
        """Drop the counters of a worker that is gone."""
        if fact.lost:
            self._runs.pop(fact.member.name, None)

    def ended(self, request: SimulatedRequest) -> None:
        """Count an ended request against the objectives, as its client sees it."""
        if request.outcome in _COUNTED:
            self._count("served", missed=request.outcome != "finished")
        first_ps, end_ps = request.first_token_ps, request.finished_ps
        if first_ps is None or end_ps is None:
            return
        self._count("ttft", missed=first_ps - request.sent_ps > TTFT_SECONDS * PS_PER_SECOND)
        if request.outcome == "finished" and request.output_tokens > 1:
            limit_ps = TPOT_SECONDS * PS_PER_SECOND * (request.output_tokens - 1)
            self._count("tpot", missed=end_ps - first_ps > limit_ps)

    def _count(self, objective: str, *, missed: bool) -> None:
        counts = self._objectives[objective]
        counts[0] += 1
        counts[1] += missed

    # --- frames -----------------------------------------------------------------------------------------------------

    def _take(self, at_ps: int) -> int:
        """Take a frame of the current state; return when the next one is due."""
        self._recorder.add(self._frame(at_ps))
        return self._start_ps + round(self._recorder.next_at * PS_PER_SECOND)

    def finish(self) -> None:
        """Take the final frame."""
        self._take(self._start_ps + round(self._recorder.next_at * PS_PER_SECOND))

    def write(self, path: Path, title: str) -> None:
        """Write the record.

        Raises:
            LorreryError: it cannot be written.
        """
        self._recorder.write(path, Hello("record", self._model, title, VERSION))

    def _seconds(self, at_ps: int) -> float:
        return _duration(at_ps - self._start_ps)

    def _frame(self, at_ps: int) -> Frame:
        frames = [
            watcher.frame(core, at_ps) for watcher, core in zip(self._watchers, self._simulation.cores, strict=True)
        ]
        workers = [
            self._worker(shard, worker, frame.preempted.get(worker.name, 0))
            for shard, frame in enumerate(frames)
            for worker in frame.now.workers
        ]
        position = {worker.id: number for number, worker in enumerate(workers)}
        return Frame(
            at=self._seconds(at_ps),
            adapters_new=[name for frame in frames for name in frame.adapters_new],
            tenants_new=[name for frame in frames for name in frame.tenants_new],
            shards=self._shards,
            workers=workers,
            unplaced=sum(frame.now.num_unplaced for frame in frames),
            held=sum(frame.now.num_held for frame in frames),
            tenants=_tenants(frames),
            adapters=_adapters(frames),
            totals=Totals(**{name: sum(getattr(frame.totals, name) for frame in frames) for name in _TOTALS}),
            ended=[self._ended(row, position) for frame in frames for row in frame.ended],
            ended_more=sum(frame.num_more_ended for frame in frames),
            events=[
                EventRow(self._seconds(event.at_ps), kind, event.text)
                for frame in frames
                for event in frame.events
                if (kind := event_kind(event.kind)) is not None
            ],
            events_more=sum(frame.num_more_events for frame in frames),
            missing=[
                MissingRow(shard, one.name, *self._gpus[one.name], one.pool_tokens, self._seconds(one.lost_ps))
                for shard, frame in enumerate(frames)
                for one in frame.missing
            ],
            faults=[FaultRow(rule) for rule in self._active_faults(at_ps)],
            objectives=[ObjectiveRow(name, *counts) for name, counts in self._objectives.items()],
        )

    def _ended(self, row: CoreEnded, position: dict[str, int]) -> EndedRow:
        one, phases = row.ended, row.ended.phases
        return EndedRow(
            one.handle,
            position.get(one.worker, NO_WORKER),
            row.adapter,
            row.tenant,
            one.prompt_tokens,
            one.output_tokens,
            self._seconds(one.arrived_ps),
            _duration(phases.queue_ps),
            _duration(phases.adapter_load_ps),
            _duration(phases.prefill_ps),
            _duration(phases.decode_ps),
            one.outcome,
        )

    def _worker(self, shard: int, worker: WorkerSnapshot, num_preempted: int) -> Worker:
        run = self._runs.get(worker.name) or _Run()
        plan = self._simulation.plan_of(worker.name)
        gpu, tensor_parallel = self._gpus[worker.name]
        return Worker(
            id=worker.name,
            shard=shard,
            gpu=gpu,
            tp=tensor_parallel,
            state="draining" if worker.draining else "ready",
            running=[
                RunningRow(*row)
                for row in zip(
                    worker.handles,
                    worker.adapters,
                    worker.tenants,
                    worker.prompt_tokens,
                    worker.output_tokens,
                    strict=True,
                )
            ],
            waiting=worker.num_waiting,
            oldest=_duration(worker.oldest_ps),
            kv=worker.kv_tokens,
            pool=worker.pool_tokens,
            adapters=[
                ResidentRow(one.adapter, one.state, one.rank, _duration(one.left_ps)) for one in worker.residents
            ],
            host=worker.num_host,
            step=0.0 if plan is None else _duration(run.step_ps),
            kind="idle" if plan is None else kind_of(prefills=bool(plan.prefills), decodes=plan.decode),
            tokens=run.num_tokens,
            busy=_duration(run.busy_ps),
            preempted=num_preempted,
        )


def _duration(ps: int) -> float:
    return round(ps / PS_PER_SECOND, 6)


def _tenants(frames: Sequence[CoreFrame]) -> list[TenantRow]:
    rows: dict[int, list[int]] = {}
    for frame in frames:
        for tenant in frame.tenants:
            row = rows.setdefault(tenant.tenant, [0] * 5)
            use = tenant.use
            row[0] += use.num_running
            row[1] += use.num_waiting
            row[2] = max(row[2], use.oldest_ps)
            row[3] += tenant.output_tokens
            row[4] += tenant.num_refused
    return [
        TenantRow(tenant, running, waiting, _duration(oldest_ps), output, refused)
        for tenant, (running, waiting, oldest_ps, output, refused) in sorted(rows.items())
    ]


def _adapters(frames: Sequence[CoreFrame]) -> list[AdapterRow]:
    rows: dict[int, list[int]] = {}
    for frame in frames:
        for adapter in frame.adapters:
            row = rows.setdefault(adapter.adapter, [0] * 5)
            counts = adapter.counts
            had = counts.num_loads, counts.num_evictions, counts.num_thrashes
            for column, value in enumerate((adapter.use.num_running, adapter.use.num_waiting, *had)):
                row[column] += value
    return [
        AdapterRow(adapter, running, waiting, loads, evictions, thrash)
        for adapter, (running, waiting, loads, evictions, thrash) in sorted(rows.items())
    ]
