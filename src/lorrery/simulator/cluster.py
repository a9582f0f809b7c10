"""Builds the schedulers and workers of a settings file under the virtual clock, and plays workloads against them.

The same settings build the same replicas (`scheduler.replicas`) and devices (`worker.build`) as in the live cluster.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from lorrery.loadgen.option_texts import expand_adapters
from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.reception import ClusterView
from lorrery.loadgen.report import UNSENT
from lorrery.loadgen.source import adapter_names, registry_advice
from lorrery.loadgen.workload.arrivals import WARMUP_CONCURRENCY, again_and_again
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.loadgen.workload.slora import adapter_name
from lorrery.scheduler.core.autoscaling import MOST_REPLICAS
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.replicas import ReplicaFactory, cluster_rules
from lorrery.service.errors import SettingsError
from lorrery.service.faults.rules import LoadRules, RuleBook
from lorrery.service.names import cut, gpu_names
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.clients import Clients
from lorrery.simulator.fleet import most_processes, num_processes
from lorrery.simulator.loop.build import RequestBuilder, ids_suffice
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.simulator.options import SimulationOptions
from lorrery.vocabulary.files import count_kinds
from lorrery.vocabulary.units import LAST_SECONDS, PS_PER_SECOND
from lorrery.worker.build import Device, device_of

if TYPE_CHECKING:
    from lorrery.simulator.autoscaling import Scaled
    from lorrery.simulator.fleet import Fleet
    from lorrery.simulator.subscribers.frames import FrameRecorder
    from lorrery.simulator.subscribers.series import SchedulerSeries
from functools import partial

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.service.faults.kinds import FREEZE_WORKER, WORKER_KINDS, WORKER_LOSS, Fault, check_faults
from lorrery.simulator.fleet import Fleet
from lorrery.vocabulary import rendezvous
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.steptime import Slowed

REPORT_SECONDS = 0.1
"""Wall time between two reports of a scheduler."""


class ShardChoice:
    """Chooses a request's scheduler, where there are several, as routers do, each with its own knowledge.

    Routers do not communicate. Each scheduler reports its number of open requests ten times a second; a router adds the
    requests that it has sent there since, times the number of routers. A report shows the state at the last arrival
    before it, so it is never newer than it would be live; later ends, of the router's own requests too, appear in the
    next report. Requests go to the routers in turn.

    Args:
        addresses: of the schedulers.
        bound: see `rendezvous.choose_bounded`.
        num_routers: at least 1.
        time_scale: wall seconds in a device second.

    Attributes:
        cores: of the schedulers; to be set before the first choice.
    """

    def __init__(self, addresses: Sequence[str], bound: float, num_routers: int, time_scale: float) -> None:
        self.cores: Sequence[ClusterCore] = ()
        self._addresses, self._bound = addresses, bound
        self._report_ps = round(REPORT_SECONDS / time_scale * PS_PER_SECOND)
        self._report = -1  # number of the last one
        self._said = [0] * len(addresses)
        self._seen = [0] * len(addresses)  # at the last arrival
        self._sent = [[0] * len(addresses) for _ in range(num_routers)]  # since the last report
        self._router = -1

    def choose(self, request: SimulatedRequest) -> int:
        """Return the index of the scheduler for a request that has just arrived."""
        sent = self._hear(request.arrived_ps)
        key = request.adapter.adapter_id if request.adapter is not None else str(request.handle)
        sizes = [len(core.members) for core in self.cores]
        there = [index for index, size in enumerate(sizes) if size] or list(range(len(sizes)))
        chosen = there[
            rendezvous.choose_bounded(
                key,
                [self._addresses[index] for index in there],
                [self._said[index] + len(self._sent) * sent[index] for index in there],
                [max(1, sizes[index]) for index in there],
                self._bound,
            )
        ]
        sent[chosen] += 1
        self._seen[chosen] += 1
        return chosen

    def _hear(self, at_ps: int) -> list[int]:
        """Apply a report due since the last arrival; return the counts sent by the router whose turn it is."""
        report = at_ps // self._report_ps
        if report != self._report:
            self._report, self._said = report, self._seen
            for sent in self._sent:
                sent[:] = [0] * len(sent)
        self._seen = [core.num_open for core in self.cores]
        self._router = (self._router + 1) % len(self._sent)
        return self._sent[self._router]


MAX_ROUTERS = 10_000
"""Most simulated routers: each keeps its own view of every scheduler."""


def check_routers(num_routers: int, num_shards: int) -> None:
    """Check the number of routers: not too many, and more than one only with several schedulers.

    Raises:
        SettingsError: there are too many, or several with one scheduler.
    """
    if num_routers > MAX_ROUTERS:
        raise SettingsError(f"{num_routers} routers are asked for; at most {MAX_ROUTERS} can be simulated")
    if num_routers > 1 and num_shards == 1:
        raise SettingsError(
            f"--routers {num_routers} goes with several schedulers only: routers are what chooses among them; add"
            " --shards N, or leave it out"
        )


def check_adapters(settings: Settings, options: LoadOptions) -> None:
    """Check, before a run, that the registry has the adapters that the options name.

    Raises:
        SettingsError: it lacks one, or has too few.
    """
    if options.adapters is None and options.num_adapters is None:
        return
    named = adapter_names(options, [name for name, _ in settings.adapters.expand()])
    if options.adapter_dirs:
        dirs = expand_adapters(options.adapter_dirs)
        named = [adapter_name(index, dirs) for index in range(options.num_adapters or 0)]
    listed = set(settings.adapters.listed(named))
    if (missing := next((name for name in named if name not in listed), None)) is not None:
        raise SettingsError(
            f"adapter {cut(missing)!r} is not in adapters.registry, which has {settings.adapters.num_adapters}"
            f" adapters; {registry_advice(named)}"
        )


def _gpus(names: Iterable[str], devices: Iterable[Device]) -> dict[str, tuple[str, int]]:
    """Return each worker's GPU name and number of GPUs, by worker name."""
    deployments = zip(names, (device.deployment for device in devices), strict=True)
    return {name: (one.gpu.name, one.tensor_parallel) for name, one in deployments}


Player = Callable[["SimulatedCluster", Sequence[WorkloadRequest]], Iterator[SimulatedRequest]]
"""Plays a workload on a cluster; yields requests as they end."""


class SimulatedCluster:
    """Schedulers and workers built from settings."""

    def __init__(self, settings: Settings, options: SimulationOptions, timeout_seconds: float) -> None:
        addresses = list(settings.router.schedulers)
        num_shards = options.shards or len(addresses)
        check_routers(options.routers, num_shards)
        processes = num_processes(settings, options.workers, num_shards)
        if processes < num_shards:
            raise SettingsError(
                f"{num_shards} schedulers have {processes} worker processes; each needs one: start as many (--workers)"
            )
        if num_shards != len(addresses):
            addresses = [f"scheduler-{shard}" for shard in range(num_shards)]
        self._names = settings.worker_names(processes)
        self._shards = [
            number % num_shards
            for number, names in enumerate(settings.workers_of_processes(processes).values())
            for _ in names
        ]
        self._settings, self._options, self._addresses = settings, options, addresses
        self._kinds = [(one, device_of(one), number) for one, number in settings.kinds(processes)]
        self.devices = [device for _, device, number in self._kinds for _ in range(number)]
        self._gpus = _gpus(self._names, self.devices)
        self._model = self.devices[0].deployment.model.name
        self._faults = RuleBook()
        self._fleets: Sequence[Fleet] = ()
        self.clients: Clients | None = None
        factories = self._factories = [ReplicaFactory(settings) for _ in addresses]
        self.adapters: dict[str, Adapter] = {
            name: factories[0].adapter(name, rank) for name, rank in settings.adapters.expand()
        }
        self.make_adapter = factories[0].adapter
        workers = [self._worker(*one) for one in zip(self._names, self._shards, self.devices, strict=True)]
        choice = ShardChoice(addresses, settings.router.max_shard_load, options.routers, settings.time_scale)
        self.simulation = Simulation(
            workers,
            [factory.placement() for factory in factories],
            rules=cluster_rules(settings),
            one_step=options.one_step,
            choose_shard=choice.choose if num_shards > 1 else None,
            worker_timeout_ps=round(settings.scheduler.worker_timeout_seconds / settings.time_scale * PS_PER_SECOND),
            timeout_ps=round(min(timeout_seconds / settings.time_scale, LAST_SECONDS) * PS_PER_SECOND),
        )
        choice.cores = self.simulation.cores

    @property
    def notices(self) -> tuple[str, ...]:
        """Remarks on the run for the reader of the report."""
        num_unsent = 0 if self.clients is None else self.clients.num_unsent
        raised = self.simulation.raised
        found = [UNSENT.format(num_unsent)] if num_unsent else []
        if raised:
            message, times = max(raised.items(), key=itemgetter(1))
            others = f", and {sum(raised.values()) - times} x something else" if len(raised) > 1 else ""
            found.append(f"{message} ({times} x{others}): what waited then has failed, what ran it was asked for again")
        return tuple(found)

    @property
    def view(self) -> ClusterView:
        """Description of the cluster for a report."""
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
        """Check that the registry has all adapters of workload and faults, and that no arrival is too late.

        Raises:
            SettingsError: for the first violation.
        """
        for fault in self._options.injected:
            if fault.adapter and fault.adapter not in self.adapters:
                raise SettingsError(f"fault {fault.text}: no such adapter in adapters.registry")
        last = requests[-1].at_seconds
        if last >= LAST_SECONDS:
            raise SettingsError(
                f"the last request is due at {last:,.7g} s; a simulation has {LAST_SECONDS:,} s at most: raise --rate,"
                " lower -n, or check the times of the trace"
            )
        for request in requests:
            if request.adapter_id is not None and request.adapter_id not in self.adapters:
                raise SettingsError(
                    f"adapter {request.adapter_id!r} of request {request.index} is not in adapters.registry, which has"
                    f" {len(self.adapters)} adapters"
                )

    def warm_up(self, requests: Sequence[WorkloadRequest], seed: int) -> None:
        """Run short requests to completion."""
        for _ in Clients(self.simulation, self.builder(LoadOptions(seed=seed))).closed_loop(
            requests, WARMUP_CONCURRENCY
        ):
            pass

    def recorder(self, every_seconds: float | None) -> "FrameRecorder":
        """Return a recorder of everything that runs from now on."""
        from lorrery.simulator.subscribers.frames import FrameRecorder

        return FrameRecorder(
            self.simulation,
            model=self._model,
            gpus=self._gpus,
            addresses=self._addresses,
            active_faults=self._faults.rules_at,
            every_seconds=every_seconds,
        )

    def series(self) -> "SchedulerSeries":
        """Return the series of a scheduler, counted from now on."""
        from lorrery.simulator.subscribers.series import SchedulerSeries

        return SchedulerSeries(self.simulation, self.adapters, self._settings.metrics)

    def play(
        self, requests: Sequence[WorkloadRequest], options: LoadOptions, player: Player | None = None
    ) -> Iterator[SimulatedRequest]:
        """Run a workload as the load generator would send it, with faults; yield requests as they end.

        Args:
            requests: of the workload.
            options: of the run.
            player: plays them in place of the load generator's clients.
        """
        simulation = self.simulation
        self._faults.plan(self._options.injected, simulation.now_ps)
        schedule_faults(self._options.injected, simulation, self._fleets)
        if player is not None:
            return player(self, requests)
        self.clients = Clients(simulation, self.builder(options))
        if options.concurrency is None:
            return self.clients.open_loop(requests)
        played = again_and_again(requests) if options.repeats else requests
        return self.clients.closed_loop(played, options.concurrency, options.schedule_seconds)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether replicas have a prefix cache, which compares prompts."""
        return self._settings.scheduler.prefix_cache.kind != "none"

    def builder(self, options: LoadOptions) -> RequestBuilder:
        """Return what makes requests of a workload's rows."""
        own = self._settings.scheduler
        return RequestBuilder(
            self._model,
            self.adapters,
            seed=options.seed,
            with_prompts=self.keeps_prefixes,
            by_ids=ids_suffice(own.prefix_cache.kind, own.block_size),
            ignore_eos=options.ignore_eos,
            max_new_tokens=options.max_new_tokens,
        )

    def scaled(self, start_ps: int, *, by_rule: bool) -> "Scaled":
        """Make workers scalable, by the settings' rules or by a caller; times count from `start_ps`."""
        from lorrery.simulator.autoscaling import AutoscalerLoop, Scaled, fleets_of

        own = self._settings.autoscaler
        fleets = self._fleets = fleets_of(self.simulation, self._kinds, self._process, len(self._addresses))
        if len(fleets) == 1:
            most = most_processes(self._settings, 1) if by_rule else MOST_REPLICAS
            fleets[0].know(num_named(self._options.injected, most))
        if not by_rule:
            return Scaled(own, self.simulation, fleets, start_ps)
        rules = [kind.autoscaler for kind, _, _ in self._kinds]
        return AutoscalerLoop(own, self.simulation, fleets, start_ps, rules)

    def _process(self, kind: Settings, device: Device, number: int, shard: int) -> list[SimulatedWorker]:
        """Make the workers of one more process of a kind."""
        names = gpu_names(f"worker-{number}", kind.worker.gpus)
        self._gpus.update(_gpus(names, [device] * len(names)))
        return [self._worker(name, shard, device) for name in names]

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
            front_end=deployment.front_end,
        )
        replica_settings = factory.replica_settings(hello)
        book = self._faults  # not the cluster: a policy could reach its requests from here

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


def num_named(faults: Iterable[Fault], most: int) -> int:
    """Return how many worker processes must exist so that every `worker-N` named by a fault does.

    Args:
        faults: of the run.
        most: most possible processes; names of others do not count.
    """
    names = [fault.worker.removeprefix("worker-").partition(".")[0] for fault in faults if fault.kind in WORKER_KINDS]
    return max((int(name) + 1 for name in names if name.isdecimal() and int(name) < most), default=0)


def schedule_faults(faults: Sequence[Fault], simulation: Simulation, fleets: Sequence[Fleet] = ()) -> None:
    """Schedule the loss, slow-down and freezing of a simulation's workers; times count from now.

    Args:
        faults: in any order.
        simulation: that has the workers.
        fleets: scalable workers, which replace lost ones; empty: the number of workers is fixed.

    Raises:
        SettingsError: a fault names an unknown worker, or overlaps another of its kind and worker.
    """
    start_ps = simulation.now_ps
    workers = [worker.name for worker in simulation.workers]
    adapters = {fault.adapter for fault in faults}
    check_faults(faults, workers=workers, adapters=adapters, replaced=bool(fleets))
    happening = [fault for fault in faults if fault.kind in WORKER_KINDS]
    for fault in sorted(happening, key=lambda fault: fault.at_ps):  # at one time, an end comes before a begin
        if simulation.keeps_histories:
            simulation.at(start_ps + fault.at_ps, partial(simulation.note_fault, fault.text))
        for worker in simulation.workers:
            if fault.concerns(worker.name):
                fleet = next((one for one in fleets if worker.name in one.worker_names), None)
                _schedule(fault, worker, simulation, start_ps, fleet)


def _schedule(
    fault: Fault, worker: SimulatedWorker, simulation: Simulation, start_ps: int, fleet: Fleet | None
) -> None:
    if fault.kind == FREEZE_WORKER:
        until_ps = NEVER if fault.until_ps == NEVER else start_ps + fault.until_ps
        simulation.at(start_ps + fault.at_ps, partial(simulation.freeze, worker, until_ps))
        return
    if fault.kind == WORKER_LOSS and fleet is not None:
        simulation.at(start_ps + fault.at_ps, partial(fleet.lose, worker))
        return
    if fault.kind == WORKER_LOSS:
        begin, end = partial(simulation.membership.lose, worker), partial(simulation.membership.attach, worker)
    else:
        begin = partial(simulation.change_pace, worker, Slowed(worker.step_time, fault.factor))
        end = partial(simulation.change_pace, worker, worker.step_time)
    simulation.at(start_ps + fault.at_ps, begin)
    if fault.until_ps < NEVER:
        simulation.at(start_ps + fault.until_ps, end)
