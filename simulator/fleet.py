"""Worker processes of a simulation that come and go: starts take their time, and who is to go drains first.

Which one goes is Kubernetes' choice: one that starts before one that serves, and of these the youngest; with several
schedulers, of the one that has most. A start takes the lowest free number, so that names come back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lorrery.simulator.engine import Simulation
from lorrery.simulator.worker import SimulatedWorker

__all__ = ["Fleet"]


@dataclass(slots=True, eq=False)
class _Process:
    """A worker process; each of its GPUs is a worker.

    Attributes:
        state: `off`, `starting`, `ready` or `draining`.
        since_ps: when that began.
        turn: counts its starts, so that an event of an earlier one is known.
    """

    number: int
    shard: int
    workers: Sequence[SimulatedWorker]
    state: str
    since_ps: int
    turn: int = 0
    num_left: int = 0


@dataclass(slots=True)
class _Meter:
    """Adds up GPU time, and replicas that serve over time."""

    since_ps: int
    gpu_ps: int = 0
    ready_ps: int = 0
    last_ps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.last_ps = self.since_ps

    def count(self, until_ps: int, num_gpus: int, num_ready: int) -> None:
        """Count what there was until now."""
        elapsed_ps = max(until_ps - self.last_ps, 0)
        self.gpu_ps += elapsed_ps * num_gpus
        self.ready_ps += elapsed_ps * num_ready
        self.last_ps = max(self.last_ps, until_ps)


class Fleet:
    """See the module.

    Args:
        simulation: that has the workers there are at first, attached.
        at_first: of each process there is at first, in order of its number.
        make: makes the workers of a further process, given its number and its scheduler's index.
        num_shards: schedulers.
        gpus_per_worker: that count while it is there.
        start_up_ps: of a start.
        drain_ps: for which what a process runs may take to end; the rest is queued again elsewhere.

    Attributes:
        workers_per_process: the GPUs that a process hosts, or groups of them by tensor parallelism.
        fewest: processes that served at one time, the least of all; `most` the other way.
        num_scale_ups: times at which more were asked for.
    """

    def __init__(
        self,
        simulation: Simulation,
        at_first: Sequence[Sequence[SimulatedWorker]],
        make: Callable[[int, int], Sequence[SimulatedWorker]],
        *,
        num_shards: int,
        gpus_per_worker: int,
        start_up_ps: int,
        drain_ps: int,
    ) -> None:
        self._simulation = simulation
        self._make = make
        self._num_shards = num_shards
        self.workers_per_process = len(at_first[0])
        self._gpus = gpus_per_worker * self.workers_per_process
        self.start_up_ps, self._drain_ps = start_up_ps, drain_ps
        now_ps = simulation.now_ps
        self._processes = [
            _Process(number, number % num_shards, workers, "ready", now_ps) for number, workers in enumerate(at_first)
        ]
        self._meter = _Meter(now_ps)
        self.fewest = self.most = len(self._processes)
        self.num_scale_ups = self.num_scale_downs = 0

    # --- what there is ----------------------------------------------------------------------------------------------

    def num(self, state: str) -> int:
        """Return how many processes are `ready`, `starting` or `draining`."""
        return sum([process.state == state for process in self._processes])

    @property
    def num_replicas(self) -> int:
        """Processes that are asked for: those that serve, and those that start."""
        return self.num("ready") + self.num("starting")

    def serving(self) -> list[SimulatedWorker]:
        """Return the workers that take new requests, in order of their processes."""
        return [worker for process in self._processes if process.state == "ready" for worker in process.workers]

    def used(self, until_ps: int) -> tuple[float, float]:
        """Return the GPU hours and the mean number of processes that serve, from the start until then, which is now."""
        self._count(until_ps)
        elapsed_ps = self._meter.last_ps - self._meter.since_ps
        mean = self._meter.ready_ps / elapsed_ps if elapsed_ps else float(self.num("ready"))
        return self._meter.gpu_ps / (3600 * 10**12), mean

    def _count(self, until_ps: int) -> None:
        num_there = sum([process.state != "off" for process in self._processes])
        self._meter.count(until_ps, num_there * self._gpus, self.num("ready"))

    # --- scaling ----------------------------------------------------------------------------------------------------

    def scale(self, num_replicas: int) -> None:
        """Start processes, or let some drain, so that there are so many; it happens behind what arrives now."""
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
        self._count(now_ps)
        process.state, process.since_ps = state, now_ps
        num_ready = self.num("ready")
        self.fewest, self.most = min(self.fewest, num_ready), max(self.most, num_ready)

    def _start(self) -> None:
        asked = [
            sum([one.shard == shard and one.state in ("ready", "starting") for one in self._processes])
            for shard in range(self._num_shards)
        ]
        shard = asked.index(min(asked))
        process = next((one for one in self._processes if one.state == "off" and one.shard == shard), None)
        if process is None:
            while len(self._processes) % self._num_shards != shard:  # its number says whose it is
                self._add()
            process = self._add()
        self._change(process, "starting")
        process.turn += 1
        ready_ps = self._simulation.now_ps + self.start_up_ps
        self._simulation.at(ready_ps, partial(self._attach, process, process.turn))

    def _add(self) -> _Process:
        number = len(self._processes)
        shard = number % self._num_shards
        workers = self._make(number, shard)
        for worker in workers:
            self._simulation.add(worker)
        self._processes.append(_Process(number, shard, workers, "off", self._simulation.now_ps))
        return self._processes[-1]

    def _attach(self, process: _Process, turn: int) -> None:
        if process.state != "starting" or process.turn != turn:
            return
        self._change(process, "ready")
        for worker in process.workers:
            self._simulation.attach(worker)

    def _stop(self) -> None:
        asked = [one for one in self._processes if one.state in ("ready", "starting")]
        per_shard = [sum([one.shard == shard for one in asked]) for shard in range(self._num_shards)]
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
            self._simulation.drain(worker, partial(self._left, process))
        if process.state == "draining":
            self._simulation.at(self._simulation.now_ps + self._drain_ps, partial(self._end, process, process.since_ps))

    def _left(self, process: _Process) -> None:
        process.num_left += 1
        if process.num_left == len(process.workers):
            self._change(process, "off")

    def _end(self, process: _Process, since_ps: int) -> None:
        """Let a process go that has drained for long enough."""
        if process.state == "draining" and process.since_ps == since_ps:
            for worker in process.workers:
                if worker.attached:
                    self._simulation.leave(worker)
