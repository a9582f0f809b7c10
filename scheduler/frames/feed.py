"""The watchers of a scheduler, and the history that is kept while there is one."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.facts import Facts
from lorrery.scheduler.frames.wire import FrameMessage, WorkerRuns, write_frame
from lorrery.scheduler.subscribers.history import History
from lorrery.scheduler.subscribers.watcher import Watcher
from lorrery.service.clocks import DeviceClock
from lorrery.view.frame import checked_hz


class Feed:
    """Frames of one scheduler.

    Args:
        core: of the scheduler.
        facts: of the scheduler.
        workers: attached, by name.
        clock: device clock.
    """

    def __init__(self, core: ClusterCore, facts: Facts, workers: Mapping[str, WorkerRuns], clock: DeviceClock) -> None:
        self._history: History | None = None
        self._core = core
        self._facts = facts
        self._workers = workers
        self._clock = clock
        self._num_watchers = 0

    async def frames(self, hz: float) -> AsyncGenerator[FrameMessage]:
        """Yield frames at `hz` per second; none is made before the previous one is taken.

        Raises:
            InvalidRequest: `hz` is too low or too high.
        """
        seconds = 1 / checked_hz(hz)
        history = self._begin()
        try:
            watcher = Watcher(history, known=self._core.adapters)
            due = time.monotonic()
            while True:
                frame = watcher.frame(self._core, self._clock.now_ps())
                yield write_frame(frame, self._workers, self._clock.time_scale)
                due = max(due + seconds, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
        finally:
            self._end()

    def _begin(self) -> History:
        self._num_watchers += 1
        if self._history is None:
            self._history = History()
            self._facts.subscribe(self._history)
        return self._history

    def _end(self) -> None:
        self._num_watchers -= 1
        if not self._num_watchers and self._history is not None:
            self._facts.unsubscribe(self._history)
            self._history = None
