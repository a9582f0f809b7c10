"""Worker processes of a simulation that come and go: starts take their time, and who is to go drains first.

Which one goes is Kubernetes' choice: one that starts before one that serves, and of these the youngest; with several
schedulers, of the one that has most. A start takes the lowest free number, so that names come back. A process that a
fault takes away is replaced as a Deployment does it: one of its name starts at once, and takes a start's time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lorrery.simulator.engine import Simulation
from lorrery.simulator.worker import SimulatedWorker

__all__ = ["Fleet", "Level", "Numbers"]


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
class Level:
    """How many processes there are from a time on.

    Attributes:
        there: serving or not.
        ready: that serve.
    """

    at_ps: int
    there: int
    ready: int


class Numbers:
    """Numbers that no worker process has had, for all groups of them: `worker-7` is of one group.

    Args:
        num_shards: schedulers; the n-th process belongs to scheduler n modulo their number.
        taken: so many are, from 0 on.
    """

    def __init__(self, num_shards: int, taken: int) -> None:
        self.num_shards = num_shards
        self._next = sorted(range(taken, taken + num_shards), key=lambda number: number % num_shards)

    def take(self, shard: int) -> int:
        """Return the lowest of a scheduler."""
        number = self._next[shard]
        self._next[shard] += self.num_shards
        return number

    def take_below(self, end: int) -> list[int]:
        """Return all below some number."""
        return [self.take(number % self.num_shards) for number in range(min(self._next), end)]


class Fleet:
    """The worker processes of a group, which are alike.

    Args:
        simulation: that has the workers.
        at_first: the processes that serve from now on: their numbers and workers.
        make: makes the workers of a further process, given its number and its scheduler's index.
        numbers: of further processes.
        gpus_per_worker: that count while it is there.
        start_up_ps: of a start.
        drain_ps: for which what a process runs may take to end; the rest is queued again elsewhere.
        name: of the group; empty: there is one.

    Attributes:
        workers_per_process: the GPUs that a process hosts, or groups of them by tensor parallelism.
        worker_names: of all that there have been.
        levels: how many there were over time.
        num_scale_ups: times at which more were asked for.
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
        """Return how many processes are `ready`, `starting` or `draining`."""
        return sum([process.state == state for process in self._processes])

    @property
    def num_replicas(self) -> int:
        """Processes that are asked for: those that serve, and those that start."""
        return self.num("ready") + self.num("starting")

    def serving(self) -> list[SimulatedWorker]:
        """Return the workers that take new requests, in order of their processes."""
        return [worker for process in self._processes if process.state == "ready" for worker in process.workers]

    @property
    def num_waiting(self) -> int:
        """Requests in the queues of its workers."""
        workers = [worker for process in self._processes for worker in process.workers if worker.attached]
        return sum([worker.replica.num_waiting for worker in workers])

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
        """Let a process start now, or start anew."""
        self._change(process, "starting")
        process.turn += 1
        ready_ps = self._simulation.now_ps + self.start_up_ps
        self._simulation.at(ready_ps, partial(self._attach, process, process.turn))

    def know(self, num_processes: int) -> None:
        """Have processes of all numbers below one, which are not there yet, so that faults may name them."""
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
            else:  # its scheduler has lost it
                self._simulation.membership.retire(worker)
                self._left(process)
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
                    self._simulation.membership.leave(worker)

    # --- faults -----------------------------------------------------------------------------------------------------

    def lose(self, worker: SimulatedWorker) -> None:
        """Let the process of a worker die now, and another start in its place, unless it was to go.

        Ignored where it is not there, and where it is lost already, with another of its workers.
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
