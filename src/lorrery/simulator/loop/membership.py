"""The workers of a simulation: attaches, drains and loses them while it runs, and finds whose boundary comes next.

A frozen worker, which begins no step for a time (`freeze_worker`), is lost too if its step would then end later than
its scheduler's timeout; it returns when the freeze ends.
"""

from collections.abc import Callable, Sequence
from functools import partial

from lorrery.scheduler.core.plan import Plan
from lorrery.simulator.loop.scheduler import Nudge, SimulatedScheduler
from lorrery.simulator.loop.state import Clock
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER


class Boundaries:
    """The next boundary of each worker, stored in the worker (`SimulatedWorker.end_ps`).

    The workers are the leaves of a tournament tree: each inner node holds the worker below it with the earliest
    boundary, and the root the earliest of all. When a worker's boundary changes, only the nodes above it are updated,
    up to the first whose result does not change. Of boundaries at one time the first in order of attaching is first.

    Cost: one comparison for each level that changes, at most the logarithm of the number of workers; nothing to clean
    up.

    Args:
        workers: in order of attaching.

    Attributes:
        next_ps: the earliest boundary of any worker; `NEVER`: there is none.
        first: the worker with that boundary; undefined if there is none.
    """

    def __init__(self, workers: list[SimulatedWorker]) -> None:
        self.next_ps = NEVER
        self.first: SimulatedWorker
        self._num = 0
        self._first: list[SimulatedWorker] = []  # per node: node i has the children 2 i and 2 i + 1, the root is 1
        self.enter(workers)

    def enter(self, workers: list[SimulatedWorker]) -> None:
        """Replace the set of workers. Linear in their number.

        Args:
            workers: in order of attaching.
        """
        self._num = len(workers)
        self._first = [*workers, *workers]  # the leaves are the second half
        for node in range(len(workers) - 1, 0, -1):
            self._first[node] = _earlier(self._first[2 * node], self._first[2 * node + 1])
        self.next_ps = NEVER
        if workers:
            self.first = self._first[1]
            self.next_ps = self.first.end_ps

    def move(self, worker: SimulatedWorker, at_ps: int) -> None:
        """Change a worker's next boundary; `NEVER`: it has none."""
        if worker.end_ps == at_ps:
            return
        worker.end_ps = at_ps
        first, node = self._first, (self._num + worker.order) >> 1
        while node:
            before, earlier = first[node], _earlier(first[2 * node], first[2 * node + 1])
            if earlier is before and earlier is not worker:
                return  # it was not the first here, and is not now
            first[node] = earlier
            node >>= 1
        self.first = first[1]
        self.next_ps = self.first.end_ps


def _earlier(one: SimulatedWorker, other: SimulatedWorker) -> SimulatedWorker:
    if one.end_ps != other.end_ps:
        return one if one.end_ps < other.end_ps else other
    return one if one.order < other.order else other


class Membership:
    """Attaches, drains and loses the workers of a simulation, and informs their scheduler.

    Args:
        clock: of the simulation.
        boundaries: of its workers.
        schedulers: by shard.
        nudge: notifies a worker of new input.
        patience_ps: a worker is lost when its step ends this much later than predicted.

    Attributes:
        leaving: callbacks for when a draining worker has left, by the worker's order.
    """

    def __init__(
        self,
        clock: Clock,
        boundaries: Boundaries,
        schedulers: Sequence[SimulatedScheduler],
        nudge: Nudge,
        patience_ps: int,
    ) -> None:
        self.leaving: dict[int, Callable[[], None]] = {}
        self._clock = clock
        self._boundaries = boundaries
        self._schedulers = schedulers
        self._nudge = nudge
        self._patience_ps = patience_ps

    def lose(self, worker: SimulatedWorker) -> None:
        """Lose a worker now; its requests are queued again elsewhere. Ignored if it is not attached."""
        if not worker.attached:
            return
        worker.catch_up(self._clock.now_ps)
        worker.attached, worker.plan = False, None
        self._boundaries.move(worker, NEVER)
        self._schedulers[worker.shard].lose(worker)

    def drain(self, worker: SimulatedWorker, gone: Callable[[], None]) -> None:
        """Give a worker no new requests from now on; it leaves when its running ones have ended.

        Args:
            worker: attached, and not draining.
            gone: called when it has left.
        """
        worker.catch_up(self._clock.now_ps)
        self.leaving[worker.order] = gone
        self._schedulers[worker.shard].drain(worker)
        if worker.plan is None and not worker.member.sequences:
            self.leave(worker)
        else:
            self._nudge(worker, True)

    def leave(self, worker: SimulatedWorker) -> None:
        """Remove a draining worker now; its remaining requests are queued again elsewhere."""
        self.lose(worker)
        if (gone := self.leaving.pop(worker.order, None)) is not None:
            gone()

    def retire(self, worker: SimulatedWorker) -> None:
        """Prevent the automatic return of a lost worker, because its process has ended."""
        worker.life += 1

    def attach(self, worker: SimulatedWorker) -> None:
        """Attach an absent or lost worker with an empty replica; requests that wait for a worker may go to it."""
        if worker.attached:
            return
        worker.renew(self._clock.now_ps)
        self._schedulers[worker.shard].attach(worker)

    def watch(self, worker: SimulatedWorker, plan: Plan) -> None:
        """Schedule a frozen worker's loss if its step ends after its scheduler's timeout, and its later return."""
        thaw_ps, patience_ps = worker.frozen_until_ps, self._patience_ps
        if thaw_ps - plan.at_ps > patience_ps:
            due_ps = plan.at_ps + plan.wait_ps + worker.gpu.step_ps() + patience_ps
            self._clock.at(due_ps, partial(self._lose_stalled, worker, plan, thaw_ps))

    def _lose_stalled(self, worker: SimulatedWorker, plan: Plan, thaw_ps: int) -> None:
        if worker.plan is plan:
            stays = worker.order not in self.leaving
            self.leave(worker)
            if stays and thaw_ps < NEVER:
                self._clock.at(thaw_ps, partial(self._come_back, worker, worker.life))

    def _come_back(self, worker: SimulatedWorker, life: int) -> None:
        if worker.life == life:
            self.attach(worker)
