"""Attaches, drains and loses workers while a simulation runs, and informs their scheduler.

A frozen worker, which begins no step for a time (`freeze_worker`), is lost too if its step would then end later than
its scheduler's timeout; it returns when the freeze ends.
"""

from collections.abc import Callable, Sequence
from functools import partial

from lorrery.scheduler.core.plan import Plan
from lorrery.simulator.boundaries import Boundaries
from lorrery.simulator.clock import Clock
from lorrery.simulator.scheduler import Nudge, SimulatedScheduler
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER


class Membership:
    """See the module.

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
