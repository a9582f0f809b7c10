"""The state of all schedulers, for those who watch the cluster: their frames, passed on together.

Each watcher has its own watch of each scheduler. A scheduler's next frame is read only when the one before has been
passed on, so a watcher that reads slowly slows down the schedulers, and nothing gathers. A scheduler that is lost is
dialled again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Self

import grpc
import grpc.aio

from lorrery.chassis.channel import failing_when_closed
from lorrery.router.shard import Shard
from lorrery.v1 import router_pb2
from lorrery.v1 import scheduler_pb2 as pb

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.2, 2.0
FIRST_SECONDS = 1.0
"""How long the first state may take, so that schedulers have answered by then."""
LATE = 1.5
"""A frame is late so many frames' times after the one before."""
SILENT_SECONDS = 2.0
"""A scheduler that owes a frame for so long beyond its time counts as lost until one comes."""


class _ShardWatch:
    """One watch of one scheduler.

    Args:
        shard: the scheduler.
        hz: frames a second.
        news: set whenever a frame has come or the scheduler is lost.
    """

    def __init__(self, shard: Shard, hz: float, news: asyncio.Event) -> None:
        self._shard = shard
        self._hz = hz
        self._news = news
        self._lives = 0
        self._time_scale = 0.0
        self._frame: pb.WatchFramesResponse | None = None
        self._taken = asyncio.Event()
        self._owes_since: float | None = None  # None: it is not connected, or we have not taken the last one yet

    @property
    def connected(self) -> bool:
        """Whether it is heard of."""
        if self._frame is not None:
            return True
        since = self._owes_since
        return since is not None and time.monotonic() - since < 1 / self._hz + SILENT_SECONDS

    @property
    def has_frame(self) -> bool:
        """Whether there is a frame to pass on."""
        return self._frame is not None

    def take(self) -> router_pb2.ShardFrame:
        """Return its state, and let it go on."""
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
        """Watch, and dial again, until cancelled."""
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            lives = self._lives
            try:
                with failing_when_closed():
                    await self._read()
            except grpc.aio.AioRpcError:
                pass  # whatever it is, it may be otherwise when the scheduler is there again
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
    """One watcher's watch; use it with `async with`, and ask for one state after the other.

    Args:
        shards: returns the schedulers that there are.
        hz: frames a second, at most.
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
        """Watch the schedulers that have come, and no more those that have gone."""
        shards = list(self._shards())
        for shard in shards:
            if shard not in self._watches:
                watch = self._watches[shard] = _ShardWatch(shard, self._hz, self._news)
                self._tasks[shard] = asyncio.create_task(watch.run(), name="cluster watch")
        for shard in self._watches.keys() - set(shards):
            del self._watches[shard]
            self._tasks.pop(shard).cancel()

    async def next(self) -> router_pb2.WatchClusterResponse:
        """Return the next state: once every scheduler that is heard of has a frame, or when one is late with it."""
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
