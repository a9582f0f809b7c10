"""From settings and load options to a simulated run and its report.

Workloads (`loadgen.source`) and reports (`loadgen.report`) are those of the live cluster; only the clock is another.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lorrery.chassis.faults import Fault
from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.report import LoadReport, SimulationCost, make_report
from lorrery.loadgen.source import BuiltWorkload, admissible, build_workload
from lorrery.loadgen.workload.arrays import Requests
from lorrery.loadgen.workload.rounds import warmup_requests
from lorrery.settings import Settings
from lorrery.simulator.cluster import SimulatedCluster, SimulationOptions
from lorrery.simulator.engine import Simulation
from lorrery.simulator.faults import never_began
from lorrery.simulator.first_workers import check_scaled
from lorrery.simulator.gaps import GapRecorder
from lorrery.simulator.garbage import collected_seldom
from lorrery.simulator.outcomes import OutcomeRecorder
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.request_faults import RequestFaultInjector
from lorrery.simulator.step_span import Observer
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.build import Device

if TYPE_CHECKING:
    from lorrery.simulator.autoscaling import Scaled
    from lorrery.simulator.frames import FrameRecorder

__all__ = ["Playing", "Progress", "SimulatedRun", "SimulationOptions", "Watch"]

Watch = Callable[["Progress"], None]
"""Told now and then how far a run is."""

_LOOK_EVERY = 256
"""Ended requests between two looks at the wall clock."""
_LOOK_SECONDS = 0.2
_SHOWN_SETTINGS = {"model", "time_scale", "worker", "workers", "scheduler", "adapters", "autoscaler"}
"""Sections that a report shows: what a simulation reads of a cluster's settings, and no key or certificate."""


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    num_requests: int
    num_ended: int = 0
    simulated_seconds: float = 0.0


@dataclass(slots=True)
class SimulatedRun:
    """A run that can be watched and looked into.

    Attributes:
        requests: of the caller's own, for the workload `given`.
        observers: further ones, of its steps.
        on_end: told of each request as it ends.
        watch: told now and then how far it is.
        record: file to write what a watcher would have seen; None: none.
        record_every: device seconds between two of its frames; None: so that there are 2,000 at most.
        notices: what a reader of its figures must know of how it was asked for.
        devices: of its workers, once it runs.
        gaps: between tokens, so far.
    """

    settings: Settings
    options: LoadOptions
    simulation_options: SimulationOptions = field(default_factory=SimulationOptions)
    requests: Requests | None = None
    observers: Sequence[Observer] = ()
    on_end: Callable[[SimulatedRequest], None] | None = None
    watch: Watch | None = None
    record: Path | None = None
    record_every: float | None = None
    notices: tuple[str, ...] = ()
    devices: Sequence[Device] = field(default=(), init=False)
    gaps: GapRecorder = field(default_factory=GapRecorder, init=False)
    _stopped: bool = field(default=False, init=False)
    _simulation: Simulation | None = field(default=None, init=False)

    def stop(self) -> None:
        """End the run early; what has ended by then is reported. For a signal handler."""
        self._stopped = True
        if self._simulation is not None:
            self._simulation.stop()

    def run(self) -> LoadReport:
        """Simulate, and return the report.

        Raises:
            LorreryError: settings or options that cannot be, a trace that cannot be read.
        """
        with collected_seldom():
            playing = self.begin()
            interrupted = self._play(playing)
        return playing.report(interrupted=interrupted)

    def begin(self, *, scaled_by_caller: bool = False) -> "Playing":
        """Make the cluster and its workload, run the warm-up, and let nothing of the workload happen yet.

        Args:
            scaled_by_caller: workers come and go as the caller says, not by a rule.

        Raises:
            LorreryError: as `run`.
        """
        settings, options = self.settings, self.options
        faults = (*settings.planned_faults(), *self.simulation_options.faults)
        check_scaled(settings, faults, by_caller=scaled_by_caller)
        cluster = SimulatedCluster(settings, replace(self.simulation_options, faults=faults), options.timeout)
        self.devices = cluster.devices
        asked = build_workload(options, list(cluster.adapters), self.requests)
        workload, num_skipped = admissible(options, asked, cluster.view)
        cluster.check(workload.requests)
        started_at = datetime.now(UTC)
        self._simulation = cluster.simulation
        cluster.warm_up(warmup_requests(workload.requests, options.warmup), options.seed)
        if self._stopped:
            cluster.simulation.close()
        start_ps, workers = cluster.simulation.now_ps, cluster.simulation.workers
        scaled = None
        if settings.is_autoscaled or scaled_by_caller:
            scaled = cluster.scaled(start_ps, by_rule=not scaled_by_caller)
        scraping = [] if scaled is None else scaled.scrapers
        recorder = None if self.record is None else cluster.recorder(self.record_every)
        recording = [] if recorder is None else [recorder]
        injector = RequestFaultInjector(faults, start_ps)
        injecting = [injector] if injector.has_rules else []
        cluster.simulation.observe([self.gaps, *scraping, *injecting, *recording, *self.observers])
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
            OutcomeRecorder(start_ps),
            cluster.play(workload.requests, options),
            started_at,
            _count(workers),
            time.process_time(),
        )

    def _play(self, playing: "Playing") -> bool:
        progress = Progress(0 if self.options.repeats else len(playing.workload.requests))
        next_look = time.monotonic()
        for request in playing.arriving:
            playing.ended(request)
            progress.num_ended += 1
            if self.watch is not None and not progress.num_ended % _LOOK_EVERY and time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                self._look(progress, playing.cluster.simulation)
            if self._stopped:
                break
        if self.watch is not None:
            self._look(progress, playing.cluster.simulation)
        return self._stopped

    def _look(self, progress: Progress, simulation: Simulation) -> None:
        assert self.watch is not None
        progress.simulated_seconds = simulation.now_ps / PS_PER_SECOND
        self.watch(progress)


@dataclass(slots=True)
class Playing:
    """A run under way: its parts, and what has become of its requests so far.

    Attributes:
        scaled: what lets its workers come and go; None: they stay.
        arriving: runs it on, and yields requests as they end.
        before: steps and plans of the warm-up.
        cpu_began: when it began, in CPU seconds of this process.
    """

    run: SimulatedRun
    cluster: SimulatedCluster
    workload: BuiltWorkload
    num_skipped: int
    faults: tuple[Fault, ...]
    scaled: "Scaled | None"
    recorder: "FrameRecorder | None"
    outcomes: OutcomeRecorder
    arriving: Iterator[SimulatedRequest]
    started_at: datetime
    before: tuple[int, int]
    cpu_began: float

    def ended(self, request: SimulatedRequest) -> None:
        """Take note of a request that has ended."""
        self.outcomes.add(request)
        if self.scaled is not None:
            self.scaled.ended(request)
        if self.run.on_end is not None:
            self.run.on_end(request)

    def report(self, *, interrupted: bool) -> LoadReport:
        """End what is still open, and return the report."""
        run, cluster = self.run, self.cluster
        for request in cluster.simulation.close():
            self.outcomes.add(request)
            if run.on_end is not None:
                run.on_end(request)
        cpu_seconds = time.process_time() - self.cpu_began
        view, options = cluster.view, run.options
        if self.recorder is not None:
            assert run.record is not None
            self.recorder.finish()
            self.recorder.write(run.record, f"{view.model}, {options.workload}, simulated")
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
            settings=run.settings.model_dump(mode="json", include=_SHOWN_SETTINGS),
            notices=(
                *run.notices,
                *never_began(run.simulation_options.faults, cost.simulated_seconds),
                *cluster.notices,
                *_extrapolated(cluster.devices),
            ),
            scaling=None if self.scaled is None else self.scaled.outcome(table),
        )


def _extrapolated(devices: Iterable[Device]) -> list[str]:
    """Return what of the run was outside the rows of worker.profile, once of each log."""
    found = dict.fromkeys(device.extrapolated for device in devices)
    return [f"step times are extrapolated beyond worker.profile: {text}" for text in found if text]


def _count(workers: Iterable[SimulatedWorker]) -> tuple[int, int]:
    """Return the steps and plans so far."""
    totals = [worker.totals for worker in workers]
    return sum(one.num_steps for one in totals), sum(one.num_plans for one in totals)
