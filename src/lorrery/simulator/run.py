"""Turns settings and load options into a simulated run and its report.

Workloads (`loadgen.source`) and reports (`loadgen.report`) are the live cluster's; only the clock differs.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.report import LoadReport, SimulationCost, make_report
from lorrery.loadgen.source import BuiltWorkload, admissible, build_workload
from lorrery.loadgen.workload.arrays import Requests
from lorrery.loadgen.workload.arrivals import warmup_requests
from lorrery.service.faults.kinds import Fault
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.cluster import Player, SimulatedCluster, check_adapters
from lorrery.simulator.fleet import check_scaled
from lorrery.simulator.interpreter import garbage_collected_seldom
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.outcomes import GapRecorder, OutcomeRecorder
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.simulator.options import Observers, Progress, SimulationOptions
from lorrery.simulator.request_faults import RequestFaultInjector
from lorrery.vocabulary.adapters import AdapterFigures, summed
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.build import Device

if TYPE_CHECKING:
    from lorrery.simulator.autoscaling import Scaled
    from lorrery.simulator.subscribers.frames import FrameRecorder
    from lorrery.simulator.subscribers.series import SchedulerSeries

__all__ = ["SHOWN_SETTINGS", "Playing", "SimulatedRun"]

_LOOK_EVERY = 256
"""Ended requests between two reads of the wall clock."""
_LOOK_SECONDS = 0.2
SHOWN_SETTINGS = {"model", "time_scale", "worker", "workers", "scheduler", "adapters", "autoscaler"}
"""Sections shown in a report: the settings that a simulation reads, without keys and certificates."""


@dataclass(slots=True)
class SimulatedRun:
    """A run that can be watched and inspected.

    Attributes:
        requests: the caller's own requests, for the workload `given`.
        player: plays `requests`; None: the load generator's clients do.
        observers: checked.
        notices: remarks on the options for the reader of the report.
        devices: of its workers, set when it begins.
        gaps: between tokens, so far.
    """

    settings: Settings
    options: LoadOptions
    simulation_options: SimulationOptions = field(default_factory=SimulationOptions)
    requests: Requests | None = None
    observers: Observers = field(default_factory=Observers)
    notices: tuple[str, ...] = ()
    player: Player | None = None
    devices: Sequence[Device] = field(default=(), init=False)
    gaps: GapRecorder = field(default_factory=GapRecorder, init=False)
    _stopped: bool = field(default=False, init=False)
    _simulation: Simulation | None = field(default=None, init=False)

    def stop(self) -> None:
        """End the run early; requests that have ended by then are reported. For a signal handler."""
        self._stopped = True
        if self._simulation is not None:
            self._simulation.stop()

    def run(self) -> LoadReport:
        """Simulate and return the report.

        Raises:
            LorreryError: invalid settings or options, or an unreadable trace.
        """
        with garbage_collected_seldom():
            playing = self.begin()
            interrupted = self._play(playing)
        return playing.report(interrupted=interrupted)

    def begin(self, *, scaled_by_caller: bool = False) -> "Playing":
        """Build the cluster and its workload and run the warm-up; start none of the workload yet.

        Args:
            scaled_by_caller: the caller scales the workers, not a rule.

        Raises:
            LorreryError: as `run`.
        """
        settings, options = self.settings, self.options
        faults = (*settings.planned_faults(), *self.simulation_options.injected)
        check_scaled(settings, faults, by_caller=scaled_by_caller)
        check_adapters(settings, options)
        cluster = SimulatedCluster(settings, replace(self.simulation_options, faults=faults), options.timeout)
        self.devices = cluster.devices
        asked = build_workload(options, list(cluster.adapters), self.requests)
        workload, num_skipped = admissible(options, asked, cluster.view)
        cluster.check(workload.requests)
        started_at = datetime.now(UTC)
        self._simulation = cluster.simulation
        if cluster.adapters:
            cluster.simulation.count_adapters()
        cluster.warm_up(warmup_requests(workload.requests, options.warmup), options.seed)
        if self._stopped:
            cluster.simulation.close()
        start_ps, workers = cluster.simulation.now_ps, cluster.simulation.workers
        scaled = None
        if settings.is_autoscaled or scaled_by_caller:
            scaled = cluster.scaled(start_ps, by_rule=not scaled_by_caller)
        watched = self.observers
        scraping = [] if scaled is None else scaled.scrapers
        recorder = None if watched.record is None else cluster.recorder(watched.record_every)
        recording = [] if recorder is None else [recorder]
        series = None if watched.metrics is None else cluster.series()
        counting = [] if series is None else [series]
        injector = RequestFaultInjector(faults, start_ps)
        injecting = [injector] if injector.has_rules else []
        cluster.simulation.subscribe([self.gaps, *scraping, *injecting, *recording, *counting, *watched.subscribers])
        if injecting:
            cluster.simulation.inject(injector)
        return Playing(
            self,
            cluster,
            workload,
            num_skipped,
            faults,
            scaled,
            recorder,
            series,
            OutcomeRecorder(start_ps),
            cluster.play(workload.requests, options, self.player),
            started_at,
            _count(workers),
            cluster.simulation.adapter_figures(),
            time.process_time(),
        )

    def _play(self, playing: "Playing") -> bool:
        progress = Progress(0 if self.options.repeats else len(playing.workload.requests))
        watch = self.observers.watch
        next_look = time.monotonic()

        def look() -> None:
            if watch is not None:
                progress.simulated_seconds = playing.cluster.simulation.now_ps / PS_PER_SECOND
                watch(progress)

        for request in playing.arriving:
            playing.ended(request)
            progress.num_ended += 1
            if watch is not None and not progress.num_ended % _LOOK_EVERY and time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                look()
            if self._stopped:
                break
        look()
        return self._stopped


@dataclass(slots=True)
class Playing:
    """A run in progress: its parts, and the outcomes of its requests so far.

    Attributes:
        scaled: scales its workers; None: their number is fixed.
        arriving: advances the run and yields requests as they end.
        before: steps and plans of the warm-up.
        adapters_before: figures of adapters in the warm-up, of each scheduler.
        cpu_began: CPU seconds of this process at the start.
    """

    run: SimulatedRun
    cluster: SimulatedCluster
    workload: BuiltWorkload
    num_skipped: int
    faults: tuple[Fault, ...]
    scaled: "Scaled | None"
    recorder: "FrameRecorder | None"
    series: "SchedulerSeries | None"
    outcomes: OutcomeRecorder
    arriving: Iterator[SimulatedRequest]
    started_at: datetime
    before: tuple[int, int]
    adapters_before: list[dict[str, AdapterFigures]]
    cpu_began: float

    def ended(self, request: SimulatedRequest) -> None:
        """Record an ended request."""
        self.outcomes.add(request)
        if self.recorder is not None:
            self.recorder.ended(request)
        if self.scaled is not None:
            self.scaled.ended(request)
        if self.run.observers.on_end is not None:
            self.run.observers.on_end(request)

    def report(self, *, interrupted: bool) -> LoadReport:
        """Close the simulation, count open requests as interrupted, and return the report."""
        run, cluster, on_end = self.run, self.cluster, self.run.observers.on_end
        if self.series is not None:
            assert run.observers.metrics is not None
            num_plans = _count(cluster.simulation.workers)[1] - self.before[1]
            self.series.write(Path(run.observers.metrics), num_plans)
        for request in cluster.simulation.close():
            self.outcomes.add(request)
            if on_end is not None:
                on_end(request)
        cpu_seconds = time.process_time() - self.cpu_began
        view, options = cluster.view, run.options
        if self.recorder is not None:
            assert run.observers.record is not None
            self.recorder.finish()
            self.recorder.write(Path(run.observers.record), f"{view.model}, {options.workload}, simulated")
        workers = cluster.simulation.workers
        table, after = self.outcomes.table(run.gaps.itl_ms()), _count(workers)
        cost = SimulationCost(
            cpu_seconds=cpu_seconds,
            simulated_seconds=float(table.end_seconds.max(initial=0.0)),
            num_steps=after[0] - self.before[0],
            num_plans=after[1] - self.before[1],
            num_workers=len(workers),
            events=tuple(fault.text for fault in self.faults),
        )
        return make_report(
            options,
            self.workload,
            view,
            table,
            simulation=cost,
            started_at=self.started_at,
            interrupted=interrupted,
            num_skipped=self.num_skipped,
            settings=run.settings.model_dump(mode="json", include=SHOWN_SETTINGS),
            notices=(
                *run.notices,
                *_never_began(run.simulation_options.injected, cost.simulated_seconds),
                *cluster.notices,
                *_extrapolated(cluster.devices),
            ),
            scaling=None if self.scaled is None else self.scaled.outcome(table),
            adapters=summed(cluster.simulation.adapter_figures(), self.adapters_before) if cluster.adapters else None,
        )


def _extrapolated(devices: Iterable[Device]) -> list[str]:
    """Return where step times were extrapolated beyond the rows of worker.profile, once per profile."""
    found = dict.fromkeys(device.extrapolated for device in devices)
    return [f"step times are extrapolated beyond worker.profile: {text}" for text in found if text]


def _count(workers: Iterable[SimulatedWorker]) -> tuple[int, int]:
    """Return the numbers of steps and plans so far."""
    totals = [worker.totals for worker in workers]
    return sum(one.num_steps for one in totals), sum(one.num_plans for one in totals)


def _never_began(faults: Iterable[Fault], end_seconds: float) -> tuple[str, ...]:
    """Return a notice for each fault without effect because the run ended before it began.

    Args:
        faults: of the run.
        end_seconds: when its last request ended, from the start of the run.
    """
    return tuple(
        f"the fault {fault.text} had no effect: the run ended at {end_seconds:.1f} s; let it begin earlier, or send for"
        " longer (--duration, --num-requests)"
        for fault in faults
        if fault.at_ps >= end_seconds * PS_PER_SECOND
    )
