"""What all schedulers stream, merged for watchers: the events of their prefix caches, and the frames of their state.

Of frames each watcher has its own stream from each scheduler. A scheduler's next frame is read only when the previous
one has been passed on, so a slow watcher slows down the schedulers and no frames accumulate. A lost scheduler is
dialled again.

The prefix caches of all workers are merged into one, for clients that see the router as one engine. Each scheduler
streams the blocks that its workers' caches store and remove. A block is in the merged cache while at least one worker
has it: it is stored with the first copy and removed with the last. The blocks of a lost worker or scheduler are
removed.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Self

import grpc
import grpc.aio

from lorrery.router.shard import Shard
from lorrery.service.errors import NoKvEvents, Overloaded, Reason
from lorrery.service.faults.kinds import Fault
from lorrery.service.network.channel import failing_when_closed
from lorrery.v1 import frame_pb2, router_pb2
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.2, 2.0
MAX_MESSAGES = 64
"""Events queued for a slow reader; beyond that, those at the schedulers wait, and finally the schedulers cut it off."""
SHARDS_SECONDS = 1.0
"""How often the set of schedulers is checked."""

_News = asyncio.Queue[tuple[str, pb.WatchKvEventsResponse | None]]
Worker = tuple[str, str]
"""A scheduler's address, and a worker's name."""


class OneCache:
    """The merged cache: blocks that at least one worker has.

    Args:
        adapter_id: only blocks of this adapter count; None: all do.
    """

    def __init__(self, adapter_id: str | None = None) -> None:
        self._adapter_id = adapter_id
        self._of_worker: dict[Worker, Counter[int]] = {}
        self._num_copies: Counter[int] = Counter()

    def apply(self, worker: Worker, events: pb.KvEvents) -> pb.KvEvents:
        """Apply a worker's events, and return the resulting events of the merged cache."""
        blocks = self._of_worker.setdefault(worker, Counter())
        net = pb.KvEvents(block_size=events.block_size)
        for event in events.events:
            kind = event.WhichOneof("event")
            if kind == "stored":
                if self._adapter_id is None or event.stored.adapter.adapter_id == self._adapter_id:
                    self._store(blocks, event.stored, events.block_size, net)
            elif kind == "removed":
                self._remove(blocks, event.removed.block_hashes, net)
            else:
                self._remove(blocks, list(blocks.elements()), net)
        return net

    def lose(self, shard: str) -> pb.KvEvents:
        """Remove a lost scheduler's blocks, and return the resulting events of the merged cache."""
        net = pb.KvEvents()
        for worker in [worker for worker in self._of_worker if worker[0] == shard]:
            blocks = self._of_worker.pop(worker)
            self._remove(blocks, list(blocks.elements()), net)
        return net

    def _store(self, blocks: Counter[int], stored: pb.BlocksStored, block_size: int, net: pb.KvEvents) -> None:
        hashes = stored.block_hashes
        blocks.update(hashes)
        self._num_copies.update(hashes)
        # A worker that has a block has all blocks before it, so the new blocks are the end of the chain.
        num_known = sum(self._num_copies[block_hash] > 1 for block_hash in hashes)
        if num_known == len(hashes):
            return
        added = net.events.add().stored
        added.CopyFrom(stored)
        if num_known:
            del added.block_hashes[:num_known]
            added.parent_block_hash = hashes[num_known - 1]
            added.token_ids_u32 = u32.pack_array(u32.view(stored.token_ids_u32)[num_known * block_size :])

    def _remove(self, blocks: Counter[int], hashes: Iterable[int], net: pb.KvEvents) -> None:
        gone = []
        for block_hash in hashes:
            if block_hash in blocks:  # not one of another adapter
                blocks[block_hash] -= 1
                if not blocks[block_hash]:
                    del blocks[block_hash]
                self._num_copies[block_hash] -= 1
                if not self._num_copies[block_hash]:
                    del self._num_copies[block_hash]
                    gone.append(block_hash)
        if gone:
            net.events.add().removed.block_hashes.extend(gone)


async def follow(shards: Callable[[], Iterable[Shard]], adapter_id: str | None = None) -> AsyncGenerator[pb.KvEvents]:
    """Yield the events of the merged cache, without end: first AllBlocksCleared, then the blocks present.

    Begins as soon as one scheduler has answered; others join when they connect.

    Args:
        shards: returns the current schedulers.
        adapter_id: see `OneCache`.

    Raises:
        NoKvEvents: a scheduler has none.
        Overloaded: the reader is too slow.
    """
    cache = OneCache(adapter_id)
    news: _News = asyncio.Queue(MAX_MESSAGES)
    answered = asyncio.Event()
    waiting = asyncio.create_task(answered.wait(), name="kv events begin")
    watching: dict[Shard, asyncio.Task[Any]] = {}

    def look_for_shards() -> list[str]:
        """Start to watch new schedulers; return the addresses of those that have gone."""
        there = set(shards())
        for shard in there - watching.keys():
            watch = _watch(shard, answered, news)
            watching[shard] = asyncio.create_task(watch, name=f"kv events of {shard.address}")
        gone = watching.keys() - there
        for shard in gone:
            watching.pop(shard).cancel()
        return [shard.address for shard in gone]

    look_for_shards()
    getting = asyncio.create_task(news.get(), name="kv events")
    try:
        await asyncio.wait((waiting, *watching.values()), return_when=asyncio.FIRST_COMPLETED)
        if answered.is_set():
            yield pb.KvEvents(events=[pb.KvEvent(cleared=pb.AllBlocksCleared())])
        while True:
            for address in look_for_shards():
                if (net := cache.lose(address)).events:
                    yield net
            await asyncio.wait(
                (getting, *watching.values()), timeout=SHARDS_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in watching.values():
                if task.done():
                    task.result()  # a watch ends only with an error
            if not getting.done():
                continue
            address, message = getting.result()
            getting = asyncio.create_task(news.get(), name="kv events")
            if all(shard.address != address for shard in watching):
                continue
            net = cache.lose(address) if message is None else cache.apply((address, message.worker_id), message.events)
            if net.events:
                yield net
    finally:
        for task in (tasks := {waiting, getting, *watching.values()}):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(shard: Shard, answered: asyncio.Event, news: _News) -> None:
    """Forward a scheduler's events, and None when it is lost; dial again, until an error is final."""
    retry_seconds = FIRST_RETRY_SECONDS
    while True:
        try:
            with failing_when_closed():
                call = shard.stub.WatchKvEvents(
                    pb.WatchKvEventsRequest(), wait_for_ready=True, metadata=shard.credentials
                )
                try:
                    await call.wait_for_connection()
                    answered.set()
                    while isinstance(message := await call.read(), pb.WatchKvEventsResponse):
                        retry_seconds = FIRST_RETRY_SECONDS
                        await news.put((shard.address, message))
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise NoKvEvents(error.details() or "") from None
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Overloaded(error.details() or "", Reason.SLOW_READER) from None
        await news.put((shard.address, None))
        await asyncio.sleep(retry_seconds)
        retry_seconds = min(LAST_RETRY_SECONDS, 2 * retry_seconds)


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
        active_faults: returns the faults of requests that are on here, with how often each has applied.
        objectives: returns the router's counts of each objective, see `RouterMetrics.objectives`.
    """

    def __init__(
        self,
        shards: Callable[[], Iterable[Shard]],
        hz: float,
        active_faults: Callable[[], Iterable[tuple[Fault, int]]],
        objectives: Callable[[], Iterable[tuple[str, int, int]]],
    ) -> None:
        self._shards, self._hz = shards, hz
        self._active_faults, self._objectives = active_faults, objectives
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
        return router_pb2.WatchClusterResponse(
            shards=[watch.take() for watch in self._watches.values()],
            faults=[
                frame_pb2.ActiveFault(rule=fault.text, num_met=num_met) for fault, num_met in self._active_faults()
            ],
            objectives=[
                router_pb2.ObjectiveCount(name=name, num_counted=num_counted, num_missed=num_missed)
                for name, num_counted, num_missed in self._objectives()
            ],
        )

    def _is_complete(self) -> bool:
        connected = [watch for watch in self._watches.values() if watch.connected]
        return bool(connected) and all(watch.has_frame for watch in connected)
