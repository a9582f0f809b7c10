"""The state of all schedulers, for watchers of the cluster: combines the schedulers' frames.

Each watcher has its own stream from each scheduler. A scheduler's next frame is read only when the previous one has
been passed on, so a slow watcher slows down the schedulers and no frames accumulate. A lost scheduler is dialled again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Self

import grpc
import grpc.aio

from lorrery.router.shard import Shard
from lorrery.service.network.channel import failing_when_closed
from lorrery.v1 import router_pb2
from lorrery.v1 import scheduler_pb2 as pb

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.2, 2.0
FIRST_SECONDS = 1.0
"""How long the first state may take, so that schedulers can answer by then."""
LATE = 1.5
"""A frame is late this many frame intervals after the previous one."""
SILENT_SECONDS = 2.0
"""A scheduler whose frame is overdue by this much counts as lost until one arrives."""


class _ShardWatch:
    """The watch of one scheduler.

    Args:
        shard: the scheduler.
        hz: frames per second.
        news: set whenever a frame has arrived or the scheduler is lost.
    """

    def __init__(self, shard: Shard, hz: float, news: asyncio.Event) -> None:
        self._shard = shard
        self._hz = hz
        self._news = news
        self._lives = 0
        self._time_scale = 0.0
        self._frame: pb.WatchFramesResponse | None = None
        self._taken = asyncio.Event()
        self._owes_since: float | None = None  # None: not connected, or the last frame is not taken yet

    @property
    def connected(self) -> bool:
        """Whether its frames arrive."""
        if self._frame is not None:
            return True
        since = self._owes_since
        return since is not None and time.monotonic() - since < 1 / self._hz + SILENT_SECONDS

    @property
    def has_frame(self) -> bool:
        """Whether there is a frame to pass on."""
        return self._frame is not None

    def take(self) -> router_pb2.ShardFrame:
        """Return its state, and allow the next frame to be read."""
        message, connected = self._frame, self.connected
        self._frame = None
        self._taken.set()
        return router_pb2.ShardFrame(
            address=self._shard.address,
            connected=connected,
            watch=self._lives,
            frame=None if message is None else message.frame,
            time_scale=self._time_scale,
        )

    async def run(self) -> None:
        """Watch, and dial again after a loss, until cancelled."""
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            lives = self._lives
            try:
                with failing_when_closed():
                    await self._read()
            except grpc.aio.AioRpcError:
                pass  # any error may be gone once the scheduler is back
            if self._lives > lives:
                retry_seconds = FIRST_RETRY_SECONDS
            self._owes_since = None
            self._news.set()
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(LAST_RETRY_SECONDS, 2 * retry_seconds)

    async def _read(self) -> None:
        request = pb.WatchFramesRequest(hz=self._hz)
        call = self._shard.stub.WatchFrames(request, wait_for_ready=True, metadata=self._shard.credentials)
        try:
            while isinstance(message := await call.read(), pb.WatchFramesResponse):
                if self._owes_since is None:
                    self._lives += 1
                    self._time_scale = message.time_scale
                self._taken.clear()
                self._frame = message
                self._owes_since = time.monotonic()
                self._news.set()
                await self._taken.wait()
                self._owes_since = time.monotonic()
        finally:
            call.cancel()


class ClusterWatch:
    """The watch of one watcher; use it with `async with`, and call `next` for one state after the other.

    Args:
        shards: returns the current schedulers.
        hz: upper bound on frames per second.
    """

    def __init__(self, shards: Callable[[], Iterable[Shard]], hz: float) -> None:
        self._shards, self._hz = shards, hz
        self._seconds = 1 / hz
        self._news = asyncio.Event()
        self._watches: dict[Shard, _ShardWatch] = {}
        self._tasks: dict[Shard, asyncio.Task[None]] = {}
        self._due = 0.0

    async def __aenter__(self) -> Self:
        self._follow()
        self._due = time.monotonic() + FIRST_SECONDS
        return self

    async def __aexit__(self, *_error: object) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self) -> None:
        """Start to watch new schedulers, and stop watching those that have gone."""
        shards = list(self._shards())
        for shard in shards:
            if shard not in self._watches:
                watch = self._watches[shard] = _ShardWatch(shard, self._hz, self._news)
                self._tasks[shard] = asyncio.create_task(watch.run(), name="cluster watch")
        for shard in self._watches.keys() - set(shards):
            del self._watches[shard]
            self._tasks.pop(shard).cancel()

    async def next(self) -> router_pb2.WatchClusterResponse:
        """Return the next state: once every connected scheduler has a frame, or when one is late."""
        self._follow()
        while (rest := self._due - time.monotonic()) > 0 and not self._is_complete():
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._news.wait()
        self._due = time.monotonic() + LATE * self._seconds
        return router_pb2.WatchClusterResponse(shards=[watch.take() for watch in self._watches.values()])

    def _is_complete(self) -> bool:
        connected = [watch for watch in self._watches.values() if watch.connected]
        return bool(connected) and all(watch.has_frame for watch in connected)
