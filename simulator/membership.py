"""Workers that come, drain, go and are lost while a simulation runs, and what that means for their scheduler.

A worker that begins no step for a time (`freeze_worker`) is lost too, where its step then ends later than its scheduler
has patience; it comes back when the time is over.
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
        nudge: lets a worker know that it has something new.
        patience_ps: a worker whose step ends so much later than it said is lost.

    Attributes:
        leaving: by the order of workers that drain: what to call when they have left.
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
        """Let a worker die now; what it had is queued again elsewhere. Ignored if it is gone."""
        if not worker.attached:
            return
        worker.catch_up(self._clock.now_ps)
        worker.attached, worker.plan = False, None
        self._boundaries.move(worker, NEVER)
        self._schedulers[worker.shard].lose(worker)

    def drain(self, worker: SimulatedWorker, gone: Callable[[], None]) -> None:
        """Give a worker nothing new from now on, and let it leave when what it runs has ended.

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
        """Let a worker that drains go now; what it still has is queued again elsewhere."""
        self.lose(worker)
        if (gone := self.leaving.pop(worker.order, None)) is not None:
            gone()

    def retire(self, worker: SimulatedWorker) -> None:
        """Let a worker that was lost not come back by itself: its process has ended."""
        worker.life += 1

    def attach(self, worker: SimulatedWorker) -> None:
        """Let a worker that is not there, or was lost, come now, with nothing; it gets what waits for one."""
        if worker.attached:
            return
        worker.renew(self._clock.now_ps)
        self._schedulers[worker.shard].attach(worker)

    def watch(self, worker: SimulatedWorker, plan: Plan) -> None:
        """Let a frozen worker be lost if its step ends later than its scheduler has patience, until it thaws."""
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
