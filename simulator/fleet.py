"""Worker processes of a simulation that come and go: starts take their time, and who is to go drains first.

Which one goes is Kubernetes' choice: one that starts before one that serves, and of these the youngest; with several
schedulers, of the one that has most. A start takes the lowest free number, so that names come back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lorrery.simulator.engine import Simulation
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import PS_PER_SECOND

__all__ = ["Fleet", "Usage"]


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


@dataclass(frozen=True, slots=True)
class Usage:
    """What a fleet used until some time.

    Attributes:
        gpu_hours: of all processes that were there, serving or not.
        fewest: processes that served at one time, the least of all.
        mean: over time.
        most: the most of all.
    """

    gpu_hours: float
    fewest: int
    mean: float
    most: int


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
        self._levels = [(now_ps, len(at_first), len(at_first))]  # since when so many were there, and served
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

    def used(self, until_ps: int) -> Usage:
        """Return what was used from the start until a time; what the clock has played after it does not count."""
        levels = [level for level in self._levels if level[0] <= until_ps]
        ends_ps = [at_ps for at_ps, _, _ in levels[1:]] + [until_ps]
        there_ps = ready_ps = 0
        for (at_ps, num_there, num_ready), end_ps in zip(levels, ends_ps, strict=True):
            there_ps += (end_ps - at_ps) * num_there
            ready_ps += (end_ps - at_ps) * num_ready
        elapsed_ps = until_ps - levels[0][0]
        served = [num_ready for _, _, num_ready in levels]
        mean = ready_ps / elapsed_ps if elapsed_ps else float(served[0])
        return Usage(there_ps * self._gpus / (3600 * PS_PER_SECOND), min(served), mean, max(served))

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
        process.state, process.since_ps = state, now_ps
        num_there = sum([one.state != "off" for one in self._processes])
        self._levels.append((now_ps, num_there, self.num("ready")))

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
