"""Worker processes of a simulation that start and stop: a start takes its time, and a process drains before it stops.

Scaling down picks the process as Kubernetes does: one that is starting before one that serves, and among these the
youngest; with several schedulers, from the one with most processes. A start takes the lowest free number, so names are
reused. A process lost to a fault is replaced as by a Deployment: one of the same name starts at once and takes the
start-up time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import WORKER_LOSS, Fault
from lorrery.service.names import gpu_names
from lorrery.service.settings.autoscaler import AutoscalerSettings
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.deployment import Deployment, weight_bytes

__all__ = ["Fleet", "Level", "Numbers"]


@dataclass(slots=True, eq=False)
class _Process:
    """A worker process; each of its GPUs is a worker.

    Attributes:
        state: `off`, `starting`, `ready` or `draining`.
        since_ps: when that state began.
        turn: counts its starts, to recognise events of an earlier start.
    """

    number: int
    shard: int
    workers: Sequence[SimulatedWorker]
    state: str
    since_ps: int
    turn: int = 0
    num_left: int = 0


@dataclass(frozen=True, slots=True)
class Level:
    """Number of processes from a time on.

    Attributes:
        there: all that are not off.
        ready: those that serve.
    """

    at_ps: int
    there: int
    ready: int


class Numbers:
    """Allocates unused numbers of worker processes, across all groups: `worker-7` exists in one group only.

    Args:
        num_shards: schedulers; the n-th process belongs to scheduler n modulo their number.
        taken: numbers 0 to `taken` - 1 are in use.
    """

    def __init__(self, num_shards: int, taken: int) -> None:
        self.num_shards = num_shards
        self._next = sorted(range(taken, taken + num_shards), key=lambda number: number % num_shards)

    def take(self, shard: int) -> int:
        """Take the lowest free number of a scheduler."""
        number = self._next[shard]
        self._next[shard] += self.num_shards
        return number

    def take_below(self, end: int) -> list[int]:
        """Take all free numbers below a limit."""
        return [self.take(number % self.num_shards) for number in range(min(self._next), end)]


class Fleet:
    """The worker processes of a group, all alike.

    Args:
        simulation: that has the workers.
        at_first: numbers and workers of the processes that serve from now on.
        make: makes the workers of a further process from its number and its scheduler's index.
        numbers: source of further process numbers.
        gpus_per_worker: GPUs of each worker, counted while it exists.
        start_up_ps: duration of a start.
        drain_ps: time that a draining process has for its running requests; the rest is queued again elsewhere.
        name: of the group; empty if there is only one.

    Attributes:
        workers_per_process: GPUs of a process, or groups of them under tensor parallelism.
        worker_names: of all workers so far.
        levels: number of processes over time.
        num_scale_ups: number of times that the target was raised.
    """

    def __init__(
        self,
        simulation: Simulation,
        at_first: Sequence[tuple[int, Sequence[SimulatedWorker]]],
        make: Callable[[int, int], Sequence[SimulatedWorker]],
        *,
        numbers: Numbers,
        gpus_per_worker: int,
        start_up_ps: int,
        drain_ps: int,
        name: str = "",
    ) -> None:
        self._simulation = simulation
        self._make, self._numbers = make, numbers
        self.name = name
        self.workers_per_process = len(at_first[0][1])
        self.gpus_per_process = gpus_per_worker * self.workers_per_process
        self.start_up_ps, self._drain_ps = start_up_ps, drain_ps
        now_ps = simulation.now_ps
        self._processes = [
            _Process(number, number % numbers.num_shards, workers, "ready", now_ps) for number, workers in at_first
        ]
        self.worker_names = {worker.name for _, workers in at_first for worker in workers}
        self.levels = [Level(now_ps, len(at_first), len(at_first))]
        self.num_scale_ups = self.num_scale_downs = 0

    # --- what there is ----------------------------------------------------------------------------------------------

    def num(self, state: str) -> int:
        """Return how many processes are in a state: `ready`, `starting` or `draining`."""
        return sum([process.state == state for process in self._processes])

    @property
    def num_replicas(self) -> int:
        """Processes that serve or are starting."""
        return self.num("ready") + self.num("starting")

    def serving(self) -> list[SimulatedWorker]:
        """Return the workers that accept new requests, in order of their processes."""
        return [worker for process in self._processes if process.state == "ready" for worker in process.workers]

    @property
    def num_waiting(self) -> int:
        """Requests in the queues of its workers."""
        workers = [worker for process in self._processes for worker in process.workers if worker.attached]
        return sum([worker.replica.num_waiting for worker in workers])

    # --- scaling ----------------------------------------------------------------------------------------------------

    def scale(self, num_replicas: int) -> None:
        """Start or drain processes to reach a number; takes effect after the arrivals of this time."""
        current = self.num_replicas
        if num_replicas > current:
            self.num_scale_ups += 1
        elif num_replicas < current:
            self.num_scale_downs += 1
        for _ in range(num_replicas - current):
            self._start()
        for _ in range(current - num_replicas):
            self._stop()

    def _change(self, process: _Process, state: str) -> None:
        now_ps = self._simulation.now_ps
        process.state, process.since_ps = state, now_ps
        num_there = sum([one.state != "off" for one in self._processes])
        self.levels.append(Level(now_ps, num_there, self.num("ready")))

    def _start(self) -> None:
        asked = [
            sum([one.shard == shard and one.state in ("ready", "starting") for one in self._processes])
            for shard in range(self._numbers.num_shards)
        ]
        shard = asked.index(min(asked))
        process = next((one for one in self._processes if one.state == "off" and one.shard == shard), None)
        self._begin(process or self._add(self._numbers.take(shard)))

    def _begin(self, process: _Process) -> None:
        """Start a process now, or restart it."""
        self._change(process, "starting")
        process.turn += 1
        ready_ps = self._simulation.now_ps + self.start_up_ps
        self._simulation.at(ready_ps, partial(self._attach, process, process.turn))

    def know(self, num_processes: int) -> None:
        """Add all missing processes with numbers below a limit, not started, so that faults may name them."""
        for number in self._numbers.take_below(num_processes):
            self._add(number)

    def _add(self, number: int) -> _Process:
        shard = number % self._numbers.num_shards
        workers = self._make(number, shard)
        for worker in workers:
            self._simulation.add(worker)
        self.worker_names |= {worker.name for worker in workers}
        self._processes.append(_Process(number, shard, workers, "off", self._simulation.now_ps))
        return self._processes[-1]

    def _attach(self, process: _Process, turn: int) -> None:
        if process.state != "starting" or process.turn != turn:
            return
        self._change(process, "ready")
        for worker in process.workers:
            self._simulation.membership.attach(worker)

    def _stop(self) -> None:
        asked = [one for one in self._processes if one.state in ("ready", "starting")]
        shards = range(self._numbers.num_shards)
        per_shard = [sum([one.shard == shard for one in asked]) for shard in shards]
        crowded = [one for one in asked if per_shard[one.shard] == max(per_shard)]
        process = max(crowded, key=lambda one: (one.state == "starting", one.since_ps, one.number))
        if process.state == "starting":
            self._change(process, "off")
            return
        self._change(process, "draining")
        process.num_left = 0
        self._simulation.at(self._simulation.now_ps, partial(self._drain, process))

    def _drain(self, process: _Process) -> None:
        for worker in process.workers:
            if worker.attached:
                self._simulation.membership.drain(worker, partial(self._left, process))
            else:  # its scheduler has lost it already
                self._simulation.membership.retire(worker)
                self._left(process)
        if process.state == "draining":
            self._simulation.at(self._simulation.now_ps + self._drain_ps, partial(self._end, process, process.since_ps))

    def _left(self, process: _Process) -> None:
        process.num_left += 1
        if process.num_left == len(process.workers):
            self._change(process, "off")

    def _end(self, process: _Process, since_ps: int) -> None:
        """Remove a process whose drain time is over."""
        if process.state == "draining" and process.since_ps == since_ps:
            for worker in process.workers:
                if worker.attached:
                    self._simulation.membership.leave(worker)

    # --- faults -----------------------------------------------------------------------------------------------------

    def lose(self, worker: SimulatedWorker) -> None:
        """Lose a worker's whole process now; another starts in its place unless it was draining.

        Ignored if the process is off, or was already lost at this time with another of its workers.
        """
        process = next(one for one in self._processes if worker in one.workers)
        if process.state == "off" or (process.state == "starting" and process.since_ps == self._simulation.now_ps):
            return
        goes = process.state == "draining"
        if not goes:
            self._begin(process)
        for one in process.workers:
            if one.attached:
                self._simulation.membership.leave(one)
            elif not goes:
                self._simulation.membership.retire(one)


def num_processes(settings: Settings, asked: int | None, num_shards: int) -> int:
    """Return the initial number of processes.

    Args:
        settings: of the cluster.
        asked: number requested; None: not given.
        num_shards: schedulers.

    Raises:
        SettingsError: a number outside the autoscaler's bounds.
    """
    if not settings.is_autoscaled:
        return settings.num_worker_processes(asked)
    if settings.workers:
        count = settings.num_worker_processes(asked)
        for number, group in enumerate(settings.workers):
            own = settings.for_group(number).autoscaler
            where = f"workers.{number}"
            if own.enabled:
                _check_schedulers(f"{where}.autoscaler", own, num_shards)
                _check_bounds(f"{where} has count {group.count}", group.count, own, f"{where}.count, or {where}.")
        return count
    own = settings.autoscaler
    _check_schedulers("autoscaler", own, num_shards)
    if asked is None:
        return min(max(settings.num_worker_processes(None), own.min_replicas, 1), own.max_replicas)
    _check_bounds(f"{asked} workers at first", asked, own, "--workers, or ")
    return asked


def most_processes(settings: Settings, at_first: int) -> int:
    """Return how many processes have names known in advance, which a fault may name.

    With several groups that is the initial number: the run decides which group gets a later number.

    Args:
        settings: of the cluster.
        at_first: initial number of processes.
    """
    if not settings.is_autoscaled or len(settings.workers) > 1:
        return at_first
    return max(kind.autoscaler.max_replicas for kind, _ in settings.kinds(at_first))


def possible_names(settings: Settings, at_first: int) -> list[str]:
    """Return the names of the workers that a fault may name, given the initial number of processes."""
    further = range(at_first, most_processes(settings, at_first))
    gpus = settings.kinds(at_first)[0][0].worker.gpus
    names = settings.worker_names(at_first)
    return [*names, *(name for number in further for name in gpu_names(f"worker-{number}", gpus))]


def _check_schedulers(where: str, own: AutoscalerSettings, num_shards: int) -> None:
    if own.min_replicas < num_shards > 1:
        raise SettingsError(
            f"{where}.min_replicas is {own.min_replicas}, and there are {num_shards} schedulers, each of which needs"
            f" a worker: set it to {num_shards}"
        )


def _check_bounds(what: str, count: int, own: AutoscalerSettings, change: str) -> None:
    least = max(own.min_replicas, 1)
    if not least <= count <= own.max_replicas:
        raise SettingsError(
            f"{what}, and the autoscaler keeps {least} to {own.max_replicas}: change {change}autoscaler.min_replicas"
            " and max_replicas"
        )


def start_up_seconds(settings: Settings, deployment: Deployment) -> float:
    """Return device seconds from a worker process's start to its first plan: each of its workers reads the weights."""
    weights = weight_bytes(deployment.model, deployment.precision, deployment.expert_parallel)
    return settings.autoscaler.start_up_seconds(weights * settings.worker.gpus)


def check_scaled(settings: Settings, faults: Sequence[Fault], *, by_caller: bool = False) -> None:
    """Refuse settings and faults that do not combine with scaling.

    Args:
        settings: of the cluster.
        faults: planned ones.
        by_caller: the caller scales workers; otherwise the autoscaler does, if enabled.

    Raises:
        SettingsError: names the first violation.
    """
    if not (settings.is_autoscaled or by_caller):
        return
    scaler = "a caller that scales" if by_caller else "the autoscaler"
    if by_caller and settings.workers:
        raise SettingsError(f"{scaler} takes workers that are alike; leave out [[workers]] (--set 'workers=[]')")
    if by_caller and (interval := settings.autoscaler.scrape_interval_seconds):
        raise SettingsError(
            f"autoscaler.scrape_interval_seconds is {interval:g}, and {scaler} scrapes as it looks; leave it and"
            " metrics_delay_seconds out (--set autoscaler.scrape_interval_seconds=0 --set"
            " autoscaler.metrics_delay_seconds=0)"
        )
    for fault in faults:
        if fault.kind != WORKER_LOSS:
            continue
        if fault.until_ps != NEVER:
            raise SettingsError(
                f"fault {fault.text} with {scaler}, for which a worker that is lost is replaced at once, by one that"
                " takes a start's time: leave out for"
            )
        if process := fault.worker.rpartition(".")[0]:
            raise SettingsError(
                f"fault {fault.text} with {scaler}, which starts processes with all their GPUs: let the process be"
                f" lost, worker={process}"
            )
