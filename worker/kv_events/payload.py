"""A batch of KV events as vLLM writes it: msgpack of [time, events, data parallel rank].

An event is an array, as in vLLM 0.18 and earlier, or a map, as in 0.24 and later:

    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

A map has the first entry under "type" and the others under the names above. With an adapter it also has `extra_keys`:
for each block, what its hash covers besides its tokens.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32
from lorrery.vocabulary.adapter_log import adapter_number

MEDIUM = "GPU"
RANK = 0
"""A worker is one engine; its GPUs are not data-parallel ranks."""

Format = Literal["array", "map"]
Event = list[Any] | dict[str, Any]
Fields = dict[str, Any]

_encode = msgspec.msgpack.Encoder().encode


def encode(events: pb.KvEvents, event_format: Format, at_seconds: float) -> bytes:
    """Return the payload of a batch.

    Args:
        events: the batch.
        event_format: how an event is encoded.
        at_seconds: Unix time.
    """
    write = _WRITERS[event_format]
    return _encode([at_seconds, [write(*_fields(event, events.block_size)) for event in events.events], RANK])


def _fields(event: pb.KvEvent, block_size: int) -> tuple[str, Fields, Fields]:
    """Return an event's type, its fields in order, and the fields that only a map has."""
    kind = event.WhichOneof("event")
    if kind == "stored":
        return _stored(event.stored, block_size)
    if kind == "removed":
        return "BlockRemoved", {"block_hashes": list(event.removed.block_hashes), "medium": MEDIUM}, {}
    if kind == "cleared":
        return "AllBlocksCleared", {}, {}
    raise ValueError(f"the scheduler sent a KV event of no kind: {kind}")


def _stored(stored: pb.BlocksStored, block_size: int) -> tuple[str, Fields, Fields]:
    name = stored.adapter.adapter_id or None
    fields: Fields = {
        "block_hashes": list(stored.block_hashes),
        "parent_block_hash": stored.parent_block_hash if stored.HasField("parent_block_hash") else None,
        "token_ids": u32.unpack(stored.token_ids_u32).tolist(),
        "block_size": block_size,
        "lora_id": None if name is None else adapter_number(name),
        "medium": MEDIUM,
        "lora_name": name,
    }
    return "BlockStored", fields, {} if name is None else {"extra_keys": [[name]] * len(stored.block_hashes)}


def _array(kind: str, fields: Fields, _: Fields) -> Event:
    return [kind, *fields.values()]


def _map(kind: str, fields: Fields, more: Fields) -> Event:
    return {"type": kind, **fields, **more}


_WRITERS: dict[Format, Callable[[str, Fields, Fields], Event]] = {"array": _array, "map": _map}
