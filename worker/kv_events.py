"""KV events of a worker, published over ZeroMQ in vLLM's format: see docs/gateways.md.

    PUB     topic, number (8 bytes, big-endian, from 0), payload
    ROUTER  a request for all batches from a number on: that number
            replies: number, payload, and at the end the number -1 with an empty payload

A payload is msgpack of [time, events, data parallel rank]. An event is an array, as in vLLM 0.18 and earlier, or a map,
as in 0.24 and later:

    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

A map has the first entry under "type" and the others under the names above; what 0.32 has beyond them is in maps only.

In vLLM the cache and the socket are in one process and end together. Here the cache is in the scheduler, so the worker
publishes that the cache is empty whenever its stream to the scheduler has ended.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import zmq
import zmq.asyncio

from lorrery.service.errors import LorreryError
from lorrery.service.telemetry.log import get_logger
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import types_pb2
from lorrery.vocabulary import u32
from lorrery.worker.metrics import WorkerMetrics
from lorrery.worker.settings import KvEventsSettings

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
LINGER_MS = 200
"""How long an ending process may take to send its last batches."""
SLICE = 64
"""Batches of a replay sent before the event loop runs other work, such as reporting steps."""

log = get_logger("worker.kv_events")


class Publisher:
    """Publishes one worker's events; an async context manager that closes its sockets.

    Args:
        settings: its section.
        worker_id: replaces `{worker}` in the topic.
        model: replaces `{model}`.
        metrics: counts batches and replays.
    """

    def __init__(self, settings: KvEventsSettings, worker_id: str, model: str, metrics: WorkerMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._topic = settings.topic.replace("{worker}", worker_id).replace("{model}", model).encode()
        self._context = zmq.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._num_batches = 0
        self._may_have_blocks = False

    def listen(self) -> None:
        """Bind or connect the sockets.

        Raises:
            LorreryError: an address cannot be bound.
        """
        try:
            self._open()
        except BaseException:
            self._close_sockets(linger_ms=0)
            self._context.term()
            raise

    def _open(self) -> None:
        settings = self._settings
        assert settings.endpoint is not None
        pub = self._pub = self._context.socket(zmq.PUB)
        pub.set_hwm(settings.hwm)
        if settings.binds:
            _bind(pub, settings.endpoint, "worker.kv_events.endpoint")
        else:
            pub.connect(settings.endpoint)
        if settings.replay_endpoint is not None:
            self._replay = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
            # A peer acknowledges every half of the mark, so this mark leaves room for all batches and the end at any
            # time.
            self._replay.set(zmq.SNDHWM, 2 * (settings.buffer_steps + 1))
            _bind(self._replay, settings.replay_endpoint, "worker.kv_events.replay_endpoint")

    def source(self, host: str) -> types_pb2.KvEventSource:
        """Return where subscribers find the events; `host` replaces a wildcard address of this machine."""
        settings = self._settings
        assert self._pub is not None
        assert settings.endpoint is not None
        return types_pb2.KvEventSource(
            endpoint=_reachable(self._pub, host) if settings.binds else settings.endpoint,
            replay_endpoint=_reachable(self._replay, host) if self._replay is not None else "",
            topic=self._topic.decode(),
            format=settings.format,
            buffer_steps=settings.buffer_steps,
            hwm=settings.hwm,
            connects=not settings.binds,
        )

    # --- publishing -------------------------------------------------------------------------------------------------

    def publish(self, events: pb.KvEvents) -> None:
        """Publish a batch to the current subscribers, and keep it for replays."""
        self._may_have_blocks = True
        self._send(events)

    def clear(self) -> None:
        """Publish that the cache is empty, unless subscribers know that already."""
        if self._may_have_blocks:
            self._may_have_blocks = False
            self._send(pb.KvEvents(events=[pb.KvEvent(cleared=pb.AllBlocksCleared())]))

    def _send(self, events: pb.KvEvents) -> None:
        assert self._pub is not None
        number = self._num_batches.to_bytes(NUMBER_BYTES, "big")
        data = encode(events, self._settings.format, time.time())
        self._pub.send_multipart((self._topic, number, data), zmq.NOBLOCK)  # over its mark a PUB socket drops it
        self._num_batches += 1
        self._kept.append((number, data))
        self._metrics.kv_events_published()

    # --- replays ----------------------------------------------------------------------------------------------------

    async def replay(self) -> None:
        """Answer replay requests, until cancelled."""
        if self._replay is None:
            await asyncio.get_running_loop().create_future()
            return
        while True:
            client, *request = await self._replay.recv_multipart()
            if len(request) != 2 or request[0] or len(request[1]) != NUMBER_BYTES:
                log.warning("replay_request_ignored", sizes=[len(frame) for frame in request])
                continue
            await self._answer(client, request[1])

    async def _answer(self, client: bytes, first: bytes) -> None:
        assert self._replay is not None
        topic = (self._topic,) if self._settings.replay_topic else ()
        self._metrics.kv_events_replayed()
        kept = [batch for batch in self._kept if batch[0] >= first]  # big-endian numbers compare as bytes
        for index, batch in enumerate(kept):
            if index % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            await self._replay.send_multipart((client, b"", *topic, *batch))
        await self._replay.send_multipart((client, b"", *((b"",) if topic else ()), END, b""))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the sockets after pending messages are sent, within `LINGER_MS`."""
        self._close_sockets(LINGER_MS)
        await asyncio.to_thread(self._context.term)

    def _close_sockets(self, linger_ms: int) -> None:
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=linger_ms)


def _bind(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str, setting: str) -> None:
    if "[" in endpoint or "::" in endpoint:
        socket.set(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise LorreryError(f"{setting}: {endpoint} cannot be taken: {error.strerror}") from None


def _reachable(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", host: str) -> str:
    """Return the address of a bound socket as reached from other hosts."""
    endpoint = str(socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
    for everywhere in ("0.0.0.0", "[::]"):  # noqa: S104  nothing is bound here
        if endpoint.startswith(f"tcp://{everywhere}:"):
            shown = f"[{host}]" if ":" in host else host
            return f"tcp://{shown}:{endpoint.rpartition(':')[2]}"
    return endpoint


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
