"""`SubscribeKvEvents` of both protocols of the gateway smg: blocks that the engine's prefix cache stores and removes.

Batches are numbered from 1, without gaps. A subscriber that asks for a sequence number gets the whole cache again from
that number on, after an event that clears everything: no batches are kept.
"""

import time
from itertools import count
from typing import Any

from smg_grpc_proto.generated import common_pb2

from lorrery.router.engines.engine import Engine
from lorrery.service.network import status
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32

MEDIUM = "GPU"
RANK = 0
"""There is one engine; its workers are not data-parallel ranks."""


async def subscribe(engine: Engine, request: Any, context: status.Context) -> None:
    """Write batches of KV events, without end."""
    numbers, event_ids = count(max(1, request.start_sequence_number)), count(1)

    async def write(events: pb.KvEvents) -> None:
        batch = common_pb2.KvEventBatch(sequence_number=next(numbers), timestamp=time.time(), dp_rank=RANK)
        for event in events.events:
            _add(batch.events.add(event_id=next(event_ids)), event, events.block_size)
        await context.write(batch)

    await engine.follow_kv_events(context, write)


def _add(message: Any, event: pb.KvEvent, block_size: int) -> None:
    kind = event.WhichOneof("event")
    if kind == "cleared":
        message.cleared.SetInParent()
    elif kind == "removed":
        message.removed.block_hashes.extend(map(_signed, event.removed.block_hashes))
        message.removed.medium, message.removed.tier = MEDIUM, common_pb2.KV_CACHE_TIER_DEVICE
    else:
        _add_stored(message.stored, event.stored, block_size)


def _add_stored(message: Any, stored: pb.BlocksStored, block_size: int) -> None:
    message.medium, message.tier = MEDIUM, common_pb2.KV_CACHE_TIER_DEVICE
    if stored.HasField("parent_block_hash"):
        message.parent_block_hash = _signed(stored.parent_block_hash)
    name = stored.adapter.adapter_id
    if name:
        message.lora_name = name
    tokens = u32.view(stored.token_ids_u32).tolist()
    for index, block_hash in enumerate(stored.block_hashes):
        block = message.blocks.add(block_hash=_signed(block_hash), block_size=block_size)
        block.token_ids.extend(tokens[index * block_size : (index + 1) * block_size])
        if name:
            block.lora_id = stored.adapter.number


def _signed(block_hash: int) -> int:
    """Return a hash in the form of these messages: the same 64 bits, signed."""
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash
