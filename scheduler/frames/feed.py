"""The watchers of a scheduler, and the history that is kept while there is one."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.history import History
from lorrery.scheduler.core.watcher import Watcher
from lorrery.scheduler.frames.wire import FrameMessage, WorkerRuns, write_frame
from lorrery.service.clocks import DeviceClock
from lorrery.service.telemetry.frame_rate import checked_hz


class Feed:
    """Frames of one scheduler.

    Args:
        core: of the scheduler.
        workers: attached, by name.
        clock: device clock.

    Attributes:
        history: of the time since the first watcher began; None: there is no watcher.
    """

    def __init__(self, core: ClusterCore, workers: Mapping[str, WorkerRuns], clock: DeviceClock) -> None:
        self.history: History | None = None
        self._core = core
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
        if self.history is None:
            self.history = History()
        return self.history

    def _end(self) -> None:
        self._num_watchers -= 1
        if not self._num_watchers:
            self.history = None
