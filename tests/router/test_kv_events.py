"""The caches of several workers, followed as one."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import cast

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.router.shard import Shard
from lorrery.router.watching import OneCache, follow
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc, types_pb2
from lorrery.vocabulary import u32

BLOCK = 2
CHAINS = [(1, 2, 3, 4), (1, 2, 5, 6), (7, 8)]
"""Hashes along three prompts, the first two of which begin alike."""
PARENT = {child: parent for chain in CHAINS for parent, child in pairwise(chain)}


def tokens(block_hash: int) -> list[int]:
    return [10 * block_hash, 10 * block_hash + 1]


def stored(hashes: list[int], adapter_id: str = "") -> pb.KvEvent:
    return pb.KvEvent(
        stored=pb.BlocksStored(
            block_hashes=hashes,
            parent_block_hash=PARENT.get(hashes[0]),
            token_ids_u32=u32.pack(token for block_hash in hashes for token in tokens(block_hash)),
            adapter=types_pb2.Adapter(adapter_id=adapter_id) if adapter_id else None,
        )
    )


def removed(hashes: list[int]) -> pb.KvEvent:
    return pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=hashes))


def apply(copy: dict[int, list[int]], events: pb.KvEvents) -> None:
    """Do what a subscriber does, and hold the events to what it may count on."""
    for event in events.events:
        if event.HasField("removed"):
            for block_hash in event.removed.block_hashes:
                del copy[block_hash]
            continue
        found = event.stored
        parent = found.parent_block_hash if found.HasField("parent_block_hash") else None
        ids = u32.unpack(found.token_ids_u32).tolist()
        assert len(ids) == BLOCK * len(found.block_hashes)
        for index, block_hash in enumerate(found.block_hashes):
            assert PARENT.get(block_hash) == parent
            assert parent is None or parent in copy
            assert block_hash not in copy
            copy[block_hash] = ids[index * BLOCK : (index + 1) * BLOCK]
            parent = block_hash


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "clear", "lose"]),
            st.sampled_from([("s1", "a"), ("s1", "b"), ("s2", "a")]),
            st.sampled_from(CHAINS),
            st.integers(1, 4),
        ),
        max_size=60,
    )
)
def test_a_block_is_there_while_some_worker_has_it(steps) -> None:
    cache, copy = OneCache(), {}
    workers: dict[tuple[str, str], set[int]] = {}
    for what, worker, chain, num in steps:
        has = workers.setdefault(worker, set())
        events = pb.KvEvents(block_size=BLOCK)
        if what == "store" and (new := [block for block in chain[:num] if block not in has]):
            events.events.append(stored(new))
            has.update(new)
        elif what == "remove" and (leaves := [b for b in has if not any(PARENT.get(c) == b for c in has)]):
            events.events.append(removed(leaves[:num]))
            has.difference_update(leaves[:num])
        elif what == "clear":
            events.events.append(pb.KvEvent(cleared=pb.AllBlocksCleared()))
            has.clear()
        if what == "lose":
            for name in [name for name in workers if name[0] == worker[0]]:
                del workers[name]
            apply(copy, cache.lose(worker[0]))
        else:
            apply(copy, cache.apply(worker, events))
        there = set().union(*workers.values()) if workers else set()
        assert copy == {block_hash: tokens(block_hash) for block_hash in there}


@pytest.mark.parametrize(
    ("num_known", "rest", "parent"), [(0, [1, 2, 3, 4], None), (1, [2, 3, 4], 1), (2, [3, 4], 2), (3, [4], 3)]
)
def test_of_a_chain_whose_beginning_another_worker_has_only_the_rest_is_told(
    num_known: int, rest: list[int], parent: int | None
) -> None:
    cache = OneCache()
    chain = [1, 2, 3, 4]
    if num_known:
        cache.apply(("s1", "a"), pb.KvEvents(block_size=BLOCK, events=[stored(chain[:num_known])]))
    (event,) = cache.apply(("s1", "b"), pb.KvEvents(block_size=BLOCK, events=[stored(chain)])).events
    assert list(event.stored.block_hashes) == rest
    assert (event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None) == parent
    assert u32.unpack(event.stored.token_ids_u32).tolist() == [token for block in rest for token in tokens(block)]
    assert not cache.apply(("s2", "a"), pb.KvEvents(block_size=BLOCK, events=[stored(chain)])).events


def test_of_one_adapter_only_its_blocks_are_told() -> None:
    cache = OneCache("a")
    events = cache.apply(("s", "w"), pb.KvEvents(block_size=BLOCK, events=[stored([7, 8], "b"), stored([1, 2], "a")]))
    assert [list(event.stored.block_hashes) for event in events.events] == [[1, 2]]
    events = cache.apply(("s", "w"), pb.KvEvents(events=[removed([8, 2])]))
    assert [list(event.removed.block_hashes) for event in events.events] == [[2]]


class _OneWorker(scheduler_pb2_grpc.SchedulerServiceServicer):
    """A scheduler with a block, and no other event."""

    async def WatchKvEvents(  # noqa: N802
        self, request: pb.WatchKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        yield pb.WatchKvEventsResponse(worker_id="w", events=pb.KvEvents(block_size=BLOCK, events=[stored([1])]))
        await asyncio.Event().wait()


async def test_who_follows_goes_on_when_the_channel_to_a_scheduler_is_opened_anew() -> None:
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(_OneWorker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    class Dialled:
        address, credentials = "s", None

        def dial(self) -> None:
            self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    shard = Dialled()
    shard.dial()
    events = follow(lambda: cast("list[Shard]", [shard]))
    try:
        async with asyncio.timeout(60):
            kinds = [(await anext(events)).events[0].WhichOneof("event") for _ in range(2)]
            await shard.channel.close()
            shard.dial()
            kinds += [(await anext(events)).events[0].WhichOneof("event") for _ in range(2)]
        assert kinds == ["cleared", "stored", "removed", "stored"]
    finally:
        await events.aclose()
        await shard.channel.close()
        await server.stop(None)
