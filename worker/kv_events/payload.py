"""A batch of KV events as vLLM writes it: msgpack of [time, events, data parallel rank].

An event is an array, as in vLLM 0.18 and earlier, or a map, as in 0.24 and later:

    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

A map has the first entry under "type" and the others under the names above; what 0.32 has beyond them is in maps only.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32

MEDIUM = "GPU"
RANK = 0
"""A worker is one engine; its GPUs are not data-parallel ranks."""
GROUP = 0
SPEC_KIND = "full_attention"
"""All layers of the modelled engine keep their blocks in one group, of vLLM's kind of that name."""

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
    found = [write(*fields) for event in events.events for fields in _fields(event, events.block_size)]
    return _encode([at_seconds, found, RANK])


def _fields(event: pb.KvEvent, block_size: int) -> Iterator[tuple[str, Fields, Fields]]:
    """Yield vLLM's events for one of ours: type, fields in order, and the fields that only a map has."""
    kind = event.WhichOneof("event")
    if kind == "stored":
        yield _stored(event.stored, block_size)
    elif kind == "removed":
        for block_hash in event.removed.block_hashes:  # vLLM removes blocks one by one
            yield "BlockRemoved", {"block_hashes": [block_hash], "medium": MEDIUM}, {"group_idx": GROUP}
    elif kind == "cleared":
        yield "AllBlocksCleared", {}, {}
    else:
        raise ValueError(f"the scheduler sent a KV event of no kind: {kind}")


def _stored(stored: pb.BlocksStored, block_size: int) -> tuple[str, Fields, Fields]:
    name = stored.adapter.adapter_id or None
    parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
    fields: Fields = {
        "block_hashes": list(stored.block_hashes),
        "parent_block_hash": parent,
        "token_ids": u32.unpack(stored.token_ids_u32).tolist(),
        "block_size": block_size,
        "lora_id": None if name is None else stored.adapter.number,
        "medium": MEDIUM,
        "lora_name": name,
    }
    # What the hash of each block covers besides its tokens and its parent.
    extra_keys = [None if name is None else [name]] * len(stored.block_hashes)
    if stored.cache_salt and parent is None:
        extra_keys[0] = [*(extra_keys[0] or ()), stored.cache_salt]
    return "BlockStored", fields, {"extra_keys": extra_keys, "group_idx": GROUP, "kv_cache_spec_kind": SPEC_KIND}


def _array(kind: str, fields: Fields, _: Fields) -> Event:
    return [kind, *fields.values()]


def _map(kind: str, fields: Fields, more: Fields) -> Event:
    return {"type": kind, **fields, **more}


_WRITERS: dict[Format, Callable[[str, Fields, Fields], Event]] = {"array": _array, "map": _map}
