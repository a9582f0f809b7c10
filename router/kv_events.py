"""The prefix caches of all workers merged into one, for clients that see the router as one engine.

Each scheduler streams the blocks that its workers' caches store and remove. A block is in the merged cache while at
least one worker has it: it is stored with the first copy and removed with the last. The blocks of a lost worker or
scheduler are removed.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from lorrery.router.shard import Shard
from lorrery.service.errors import NoKvEvents, Overloaded, Reason
from lorrery.service.network.channel import failing_when_closed
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
