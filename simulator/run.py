"""From settings and load options to a simulated run and its report.

The same settings make the same replicas (`scheduler.replicas`), devices (`worker.build`), workloads (`loadgen.source`)
and reports (`loadgen.report`) as in the live cluster; only the clock is another.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lorrery.chassis import rendezvous
from lorrery.chassis.errors import SettingsError
from lorrery.chassis.fault_rules import LoadRules, RuleBook
from lorrery.chassis.faults import LOAD_FAILURE, Fault
from lorrery.loadgen.cluster_view import ClusterView
from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.report import UNSENT, LoadReport, SimulationCost, make_report
from lorrery.loadgen.source import BuiltWorkload, admissible, build_workload
from lorrery.loadgen.workload.arrays import Requests
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.loadgen.workload.rounds import WARMUP_CONCURRENCY, again_and_again, warmup_requests
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.replicas import ReplicaFactory, cluster_rules
from lorrery.settings import Settings
from lorrery.simulator.build import RequestBuilder, hash_ids_suffice
from lorrery.simulator.clients import Clients
from lorrery.simulator.engine import Simulation
from lorrery.simulator.faults import never_began, schedule_faults
from lorrery.simulator.first_workers import check_scaled_faults, num_processes
from lorrery.simulator.gaps import GapRecorder
from lorrery.simulator.garbage import collected_seldom
from lorrery.simulator.outcomes import OutcomeRecorder
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.request_faults import RequestFaultInjector
from lorrery.simulator.step_span import Observer
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND
from lorrery.vocabulary.worker_kinds import count_kinds
from lorrery.worker.build import Device, device_of

if TYPE_CHECKING:
    from lorrery.simulator.autoscaling import AutoscalerLoop
    from lorrery.simulator.frames import FrameRecorder

Watch = Callable[["Progress"], None]
"""Told now and then how far a run is."""

_LOOK_EVERY = 256
"""Ended requests between two looks at the wall clock."""
_LOOK_SECONDS = 0.2
_SHOWN_SETTINGS = {"model", "time_scale", "worker", "workers", "scheduler", "adapters", "autoscaler"}
"""Sections that a report shows: what a simulation reads of a cluster's settings, and no key or certificate."""
LAST_SECONDS = NEVER // PS_PER_SECOND
"""Times are kept in 64 bits of picoseconds: 53 days."""


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    num_requests: int
    num_ended: int = 0
    simulated_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What a simulation is asked for beside settings and workload.

    Attributes:
        num_workers: worker processes of all schedulers together; the GPUs of the n-th one belong to scheduler n modulo
            their number. None: as `Settings.num_worker_processes` has it.
        num_shards: schedulers; None: as many as the router has.
        faults: what goes wrong.
        one_step: plan before every step, as the oracle does; slow.
    """

    num_workers: int | None = None
    num_shards: int | None = None
    faults: tuple[Fault, ...] = ()
    one_step: bool = False


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
        devices: of its workers, once it runs.
    """

    settings: Settings
    options: LoadOptions
    simulation_options: SimulationOptions = SimulationOptions()
    requests: Requests | None = None
    observers: Sequence[Observer] = ()
    on_end: Callable[[SimulatedRequest], None] | None = None
    watch: Watch | None = None
    record: Path | None = None
    record_every: float | None = None
    devices: Sequence[Device] = field(default=(), init=False)
    _gaps: GapRecorder = field(default_factory=GapRecorder, init=False)
    _stopped: bool = field(default=False, init=False)

    def stop(self) -> None:
        """End the run early; what has ended by then is reported. For a signal handler."""
        self._stopped = True

    def run(self) -> LoadReport:
        """Simulate, and return the report.

        Raises:
            LorreryError: settings or options that cannot be, a trace that cannot be read.
        """
        settings, options = self.settings, self.options
        faults = (*settings.planned_faults(), *settings.of_workers(self.simulation_options.faults))
        check_scaled_faults(settings, faults)
        cluster = _SimulatedCluster(settings, replace(self.simulation_options, faults=faults), options.timeout)
        self.devices = cluster.devices
        view = cluster.view
        asked = build_workload(options, list(cluster.adapters), self.requests)
        workload, num_skipped = admissible(options, asked, view)
        cluster.check(workload.requests)
        started_at = datetime.now(UTC)
        cluster.warm_up(warmup_requests(workload.requests, options.warmup), options.seed)
        start_ps, workers = cluster.simulation.now_ps, cluster.simulation.workers
        before = _count(workers)
        scaled = cluster.autoscale(start_ps) if settings.autoscaler.enabled else None
        scraping = [] if scaled is None else [scaled.scraper]
        recording = [] if self.record is None else [cluster.recorder(self.record_every)]
        injector = RequestFaultInjector(faults, start_ps)
        injecting = [injector] if injector.has_rules else []
        cluster.simulation.observe([self._gaps, *scraping, *injecting, *recording, *self.observers])
        if injecting:
            cluster.simulation.inject(injector)
        outcomes = OutcomeRecorder(start_ps)
        cpu = time.process_time()
        with collected_seldom():
            interrupted = self._play(cluster, workload, outcomes, scaled)
        cpu_seconds = time.process_time() - cpu
        for recorder in recording:
            assert self.record is not None
            recorder.finish()
            recorder.write(self.record, f"{view.model}, {options.workload}, simulated")
        table, after = outcomes.table(self._gaps.gaps()), _count(workers)
        cost = SimulationCost(
            cpu_seconds=cpu_seconds,
            simulated_seconds=float(table.end_seconds.max(initial=0.0)),
            num_steps=after[0] - before[0],
            num_plans=after[1] - before[1],
            num_workers=len(workers),
            events=tuple(fault.text for fault in faults),
        )
        return make_report(
            options,
            workload,
            view,
            table,
            simulation=cost,
            started_at=started_at,
            interrupted=interrupted,
            num_skipped=num_skipped,
            settings=settings.model_dump(mode="json", include=_SHOWN_SETTINGS),
            notices=(*never_began(self.simulation_options.faults, cost.simulated_seconds), *cluster.notices),
            scaling=None if scaled is None else scaled.outcome(table),
        )

    def _play(
        self,
        cluster: "_SimulatedCluster",
        workload: BuiltWorkload,
        outcomes: OutcomeRecorder,
        scaled: "AutoscalerLoop | None",
    ) -> bool:
        progress = Progress(0 if self.options.repeats else len(workload.requests))
        next_look = time.monotonic()
        for request in cluster.play(workload.requests, self.options):
            outcomes.add(request)
            if scaled is not None:
                scaled.scraper.ended(request)
            if self.on_end is not None:
                self.on_end(request)
            progress.num_ended += 1
            if self.watch is not None and not progress.num_ended % _LOOK_EVERY and time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                self._look(progress, cluster.simulation)
            if self._stopped:
                break
        if self.watch is not None:
            self._look(progress, cluster.simulation)
        for request in cluster.simulation.close():
            outcomes.add(request)
            if self.on_end is not None:
                self.on_end(request)
        return self._stopped

    def _look(self, progress: Progress, simulation: Simulation) -> None:
        assert self.watch is not None
        progress.simulated_seconds = simulation.now_ps / PS_PER_SECOND
        self.watch(progress)


def _gpus(names: Iterable[str], devices: Iterable[Device]) -> dict[str, tuple[str, int]]:
    """Return by worker its GPU's name, and how many of them it has."""
    deployments = zip(names, (device.deployment for device in devices), strict=True)
    return {name: (one.gpu.name, one.tensor_parallel) for name, one in deployments}


def _count(workers: Iterable[SimulatedWorker]) -> tuple[int, int]:
    """Return the steps and plans so far."""
    totals = [worker.totals for worker in workers]
    return sum(one.num_steps for one in totals), sum(one.num_plans for one in totals)


class _SimulatedCluster:
    """Schedulers and workers of some settings."""

    def __init__(self, settings: Settings, options: SimulationOptions, timeout_seconds: float) -> None:
        addresses = list(settings.router.schedulers)
        num_shards = options.num_shards or len(addresses)
        if num_shards != len(addresses):
            addresses = [f"scheduler-{shard}" for shard in range(num_shards)]
        processes = num_processes(settings, options.num_workers, num_shards)
        self._names = settings.worker_names(processes)
        if processes < num_shards:
            raise SettingsError(f"{num_shards} schedulers have {processes} worker processes; each needs one")
        self._shards = [
            number % num_shards
            for number, names in enumerate(settings.workers_of_processes(processes).values())
            for _ in names
        ]
        self._settings, self._options, self._addresses = settings, options, addresses
        self.devices = [device for one, number in settings.kinds(processes) for device in [device_of(one)] * number]
        self._gpus = _gpus(self._names, self.devices)
        self._model = self.devices[0].deployment.model.name
        self._faults = RuleBook()
        self.clients: Clients | None = None
        factories = self._factories = [ReplicaFactory(settings) for _ in addresses]
        self.adapters: dict[str, Adapter] = {
            name: factories[0].adapter(name, rank) for name, rank in settings.adapters.expand()
        }
        workers = [self._worker(*one) for one in zip(self._names, self._shards, self.devices, strict=True)]
        self.simulation = Simulation(
            workers,
            [factory.placement() for factory in factories],
            rules=cluster_rules(settings),
            one_step=options.one_step,
            choose_shard=self._choose_shard if num_shards > 1 else None,
            worker_timeout_ps=round(settings.scheduler.worker_timeout_seconds / settings.time_scale * PS_PER_SECOND),
            timeout_ps=round(min(timeout_seconds / settings.time_scale, LAST_SECONDS) * PS_PER_SECOND),
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """What a reader of the report must know of what was played."""
        num_unsent = 0 if self.clients is None else self.clients.num_unsent
        return (UNSENT.format(num_unsent),) if num_unsent else ()

    @property
    def view(self) -> ClusterView:
        """What a report says of the cluster."""
        own, num_shards = self._settings.scheduler, len(self._addresses)
        return ClusterView(
            model=self._model,
            time_scale=self._settings.time_scale,
            num_shards=num_shards,
            num_connected_shards=num_shards,
            max_req_input_len=own.max_req_input_len,
            max_req_total_len=own.max_req_total_len,
            workers=count_kinds(
                (device.deployment.gpu.name, device.deployment.tensor_parallel) for device in self.devices
            ),
        )

    def check(self, requests: Sequence[WorkloadRequest]) -> None:
        """Refuse a workload or faults with adapters that the cluster does not know, and times beyond all that is told.

        Raises:
            SettingsError: names the first.
        """
        for fault in self._options.faults:
            if fault.adapter and fault.adapter not in self.adapters:
                raise SettingsError(f"fault {fault.text}: no such adapter in adapters.registry")
        last = requests[-1].at_seconds
        if last >= LAST_SECONDS:
            raise SettingsError(f"a request is due at {last:,.0f} s; a simulation has {LAST_SECONDS:,} s at most")
        for request in requests:
            if request.adapter_id is not None and request.adapter_id not in self.adapters:
                raise SettingsError(
                    f"adapter {request.adapter_id!r} of request {request.index} is not in adapters.registry, which has"
                    f" {len(self.adapters)} adapters"
                )

    def warm_up(self, requests: Sequence[WorkloadRequest], seed: int) -> None:
        """Run short requests to their ends."""
        for _ in Clients(self.simulation, self._builder(LoadOptions(seed=seed))).closed_loop(
            requests, WARMUP_CONCURRENCY
        ):
            pass

    def recorder(self, every_seconds: float | None) -> "FrameRecorder":
        """Record what runs from now on."""
        from lorrery.simulator.frames import FrameRecorder

        return FrameRecorder(
            self.simulation,
            model=self._model,
            gpus=self._gpus,
            addresses=self._addresses,
            every_seconds=every_seconds,
        )

    def play(self, requests: Sequence[WorkloadRequest], options: LoadOptions) -> Iterator[SimulatedRequest]:
        """Run a workload as the load generator would send it, faults included; yield requests as they end."""
        simulation = self.simulation
        self._faults.plan(self._options.faults, simulation.now_ps)
        schedule_faults(self._options.faults, simulation)
        self.clients = Clients(simulation, self._builder(options))
        if options.concurrency is None:
            return self.clients.open_loop(requests)
        played = again_and_again(requests) if options.repeats else requests
        return self.clients.closed_loop(played, options.concurrency, options.schedule_seconds)

    def _builder(self, options: LoadOptions) -> RequestBuilder:
        own = self._settings.scheduler
        return RequestBuilder(
            self._model,
            self.adapters,
            seed=options.seed,
            with_prompts=own.prefix_cache.kind != "none",
            by_hash_ids=hash_ids_suffice(own.prefix_cache.kind, own.block_size),
            ignore_eos=options.ignore_eos,
            max_new_tokens=options.max_new_tokens,
        )

    def autoscale(self, start_ps: int) -> "AutoscalerLoop":
        """Let the rule of the settings scale the workers from now on; times count from `start_ps`."""
        from lorrery.simulator.autoscaling import AutoscalerLoop, fleet_of

        def make(number: int, shard: int) -> list[SimulatedWorker]:
            device = self.devices[0]
            names = self._settings.workers_of_processes(number + 1)[f"worker-{number}"]
            self._gpus.update(_gpus(names, [device] * len(names)))
            return [self._worker(name, shard, device) for name in names]

        fleet = fleet_of(self._settings, self.simulation, self.devices[0], make, len(self._addresses))
        return AutoscalerLoop(self._settings.autoscaler, self.simulation, fleet, start_ps)

    def _worker(self, name: str, shard: int, device: Device) -> SimulatedWorker:
        deployment, factory = device.deployment, self._factories[shard]
        hello = WorkerHello(
            worker_id=name,
            gpu=deployment.gpu.name,
            model=deployment.model.name,
            tensor_parallel=deployment.tensor_parallel,
            max_total_token_num=device.pool_tokens,
            step_time_model=device.settings["step_time"],
            needs_prompts=False,
            device=device.settings,
        )
        replica_settings = factory.replica_settings(hello)
        faults = self._options.faults
        if replica_settings.adapter_options.blocking and any(f.kind == LOAD_FAILURE and f.never_ends for f in faults):
            raise SettingsError("fault adapter_load_failure without for: a prefill that waits for the load never runs")

        book = self._faults  # not the cluster, whose requests a policy could find from here

        def make_replica() -> Replica:
            return factory.replica(replica_settings, LoadRules(book, name))

        return SimulatedWorker(
            name,
            make_replica,
            device.step_time,
            shard,
            replica_settings.max_total_token_num,
            device.pace,
        )

    def _choose_shard(self, request: SimulatedRequest) -> int:
        key = request.adapter.adapter_id if request.adapter is not None else str(request.handle)
        return rendezvous.choose(key, self._addresses)
