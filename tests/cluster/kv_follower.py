"""A subscriber to one worker's KV events, as a router that is aware of caches has: it sees nothing else of the cluster.

It asks for what it has missed, and knows by numbers that begin again that the worker has, too.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from lorrery.service.local.cluster import LocalCluster
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc
from lorrery.vocabulary import u32
from tests.cluster.harness import PATIENCE_SECONDS

END = b"\xff" * 8
Block = tuple[str | None, tuple[int, ...]]
"""A block's adapter, and all tokens from the beginning of its prompt to the block's end."""


class Copy:
    """A worker's prefix cache, rebuilt from events in vLLM's format."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.num_copies: Counter[int] = Counter()
        self.num_removed = self.num_cleared = 0

    def apply(self, event: list[Any] | Mapping[str, Any]) -> None:
        kind, *fields = event.values() if isinstance(event, Mapping) else event
        if kind == "AllBlocksCleared":
            self.num_cleared += 1
            self.blocks.clear()
            self.num_copies.clear()
        elif kind == "BlockRemoved":
            hashes, medium = fields[:2]
            assert medium == "GPU"
            for block_hash in hashes:
                self.num_copies[block_hash] -= 1
                if not self.num_copies[block_hash]:
                    del self.blocks[block_hash]
            self.num_removed += len(hashes)
        else:
            assert kind == "BlockStored"
            hashes, parent, token_ids, block_size, lora_id, medium, lora_name = fields[:7]
            assert medium == "GPU"
            assert (lora_id is None) == (lora_name is None)
            assert len(token_ids) == len(hashes) * block_size
            tokens = self.blocks[parent][1] if parent is not None else ()
            assert parent is None or self.blocks[parent][0] == lora_name
            for index, block_hash in enumerate(hashes):
                tokens += tuple(token_ids[index * block_size : (index + 1) * block_size])
                assert self.blocks.setdefault(block_hash, (lora_name, tokens)) == (lora_name, tokens)
                self.num_copies[block_hash] += 1


class Follower:
    """Keeps a copy up to date, until its context ends.

    Args:
        endpoint: of the worker's events.
        replay_endpoint: for those that are missing.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.copy = Copy()
        self.next = 0
        self.num_replayed = 0
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._context = zmq.asyncio.Context()
        self._sub: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.be_deaf()
        self._context.destroy(linger=0)

    async def listen(self) -> None:
        """Subscribe, and catch up."""
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(self._endpoint)
        await self.catch_up()
        self._task = asyncio.create_task(self._follow(self._sub))

    async def be_deaf(self) -> None:
        """Hear nothing until the next `listen`."""
        if self._task is not None and self._sub is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._sub.close(linger=0)
            self._task = self._sub = None

    async def _follow(self, sub: zmq.asyncio.Socket) -> None:
        while True:
            topic, number, payload = await sub.recv_multipart()
            assert topic == b""
            if int.from_bytes(number, "big") < self.next:
                self.copy, self.next = Copy(), 0
            if int.from_bytes(number, "big") > self.next:
                await self.catch_up()
            self._take(number, payload)

    async def catch_up(self) -> None:
        """Ask for everything from the next batch on."""
        replay = self._context.socket(zmq.DEALER)
        try:
            replay.connect(self._replay_endpoint)
            await replay.send_multipart((b"", self.next.to_bytes(8, "big")))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    empty, topic, number, payload = await replay.recv_multipart()
                    assert empty == topic == b""
                    if number == END:
                        assert payload == b""
                        return
                    self.num_replayed += self._take(number, payload)
        finally:
            replay.close(linger=0)

    def _take(self, number: bytes, payload: bytes) -> bool:
        if int.from_bytes(number, "big") != self.next:
            return False
        at_seconds, events, rank = msgspec.msgpack.decode(payload)
        assert at_seconds > 1.7e9
        assert rank == 0
        for event in events:
            self.copy.apply(event)
        self.next += 1
        return True


class GatewayFollower:
    """Follows the router as one engine, as the gateway smg does.

    Args:
        call: its SubscribeKvEvents.
    """

    def __init__(self, call: Any) -> None:
        self.blocks: dict[int, Block] = {}
        self.num_batches = 0
        self._call = call
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._call.initial_metadata()
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        if self._task.done() and not self._task.cancelled():
            self._task.result()  # what was wrong with an event
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._call.cancel()

    async def _follow(self) -> None:
        async for batch in self._call:
            self.num_batches += 1
            assert batch.sequence_number == self.num_batches
            for event in batch.events:
                self._apply(event)

    def _apply(self, event: Any) -> None:
        kind = event.WhichOneof("data")
        if kind == "cleared":
            self.blocks.clear()
        elif kind == "removed":
            for block_hash in event.removed.block_hashes:
                del self.blocks[block_hash % 2**64]
        else:
            parent = event.stored.parent_block_hash % 2**64 if event.stored.HasField("parent_block_hash") else None
            name, tokens = self.blocks[parent] if parent is not None else (event.stored.lora_name or None, ())
            for block in event.stored.blocks:
                assert len(block.token_ids) == block.block_size
                tokens = (*tokens, *block.token_ids)
                assert block.block_hash % 2**64 not in self.blocks
                self.blocks[block.block_hash % 2**64] = (name, tokens)


async def cached_blocks(cluster: LocalCluster, worker_id: str) -> dict[int, Block]:
    """Return what the scheduler says is in a worker's prefix cache now; it walks the cache itself."""
    async with cluster._channel(cluster.scheduler_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.WatchKvEvents(pb.WatchKvEventsRequest(worker_id=worker_id), timeout=PATIENCE_SECONDS)
        message = await call.read()
        assert message.worker_id == worker_id
        call.cancel()
    copy = Copy()
    for event in as_vllm_writes_them(message.events):
        copy.apply(event)
    return copy.blocks


def as_vllm_writes_them(events: pb.KvEvents) -> Iterable[list[Any]]:
    for event in events.events:
        stored, removed = event.stored, event.removed
        if event.HasField("stored"):
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            name = stored.adapter.adapter_id or None
            token_ids = u32.unpack(stored.token_ids_u32).tolist()
            number = None if name is None else 1
            yield ["BlockStored", list(stored.block_hashes), parent, token_ids, events.block_size, number, "GPU", name]
        elif event.HasField("removed"):
            yield ["BlockRemoved", list(removed.block_hashes), "GPU"]
        else:
            yield ["AllBlocksCleared"]
