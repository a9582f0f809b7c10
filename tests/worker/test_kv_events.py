"""What a worker publishes, read as vLLM's own subscribers read it: with its types, and over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.settings.cluster import changed, load
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import types_pb2
from lorrery.vocabulary import u32
from lorrery.worker.kv_events import END, Publisher, encode
from lorrery.worker.metrics import WorkerMetrics
from lorrery.worker.settings import KvEventsSettings

BIG = 2**64 - 1
FURTHER = ("extra_keys", "group_idx", "kv_cache_spec_kind")


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class MapEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


def event_types(base: type) -> tuple[type, type, type]:
    """VLLM's three events, as arrays (until 0.18) or as maps (since)."""
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[int]),
            ("parent_block_hash", int | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
        ],
        bases=(base,),
        tag=True,
        array_like=base is ArrayEvent,
    )
    removed = msgspec.defstruct(
        "BlockRemoved",
        [("block_hashes", list[int]), ("medium", str | None)],
        bases=(base,),
        tag=True,
        array_like=base is ArrayEvent,
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], bases=(base,), tag=True, array_like=base is ArrayEvent)
    return stored, removed, cleared


EVENTS = pb.KvEvents(
    block_size=2,
    events=[
        pb.KvEvent(cleared=pb.AllBlocksCleared()),
        pb.KvEvent(stored=pb.BlocksStored(block_hashes=[1, BIG], token_ids_u32=u32.pack([7, 8, 9, 2**32 - 1]))),
        pb.KvEvent(
            stored=pb.BlocksStored(
                block_hashes=[3],
                parent_block_hash=BIG,
                token_ids_u32=u32.pack([5, 6]),
                adapter=types_pb2.Adapter(adapter_id="a", rank=8, version=2, number=7),
                cache_salt="pepper",
            )
        ),
        pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=[3, BIG])),
        pb.KvEvent(
            stored=pb.BlocksStored(
                block_hashes=[4, 5],
                token_ids_u32=u32.pack([1, 2, 3, 4]),
                adapter=types_pb2.Adapter(adapter_id="a", rank=8, version=2, number=7),
                cache_salt="pepper",
            )
        ),
    ],
)


@pytest.mark.parametrize(("event_format", "base"), [("array", ArrayEvent), ("map", MapEvent)])
def test_a_payload_reads_with_the_types_of_vllm(event_format, base) -> None:
    stored, removed, cleared = event_types(base)
    batch = msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[stored | removed | cleared]), ("data_parallel_rank", int | None, None)],
        array_like=True,
    )
    read = msgspec.msgpack.decode(encode(EVENTS, event_format, 1.5), type=batch)
    assert (read.ts, read.data_parallel_rank) == (1.5, 0)
    assert read.events[0] == cleared()
    assert read.events[1] == stored([1, BIG], None, [7, 8, 9, 2**32 - 1], 2, None, "GPU", None)
    assert read.events[2] == stored([3], BIG, [5, 6], 2, 7, "GPU", "a")
    assert read.events[3:] == [
        removed([3], "GPU"),
        removed([BIG], "GPU"),
        stored([4, 5], None, [1, 2, 3, 4], 2, 7, "GPU", "a"),
    ]


def test_an_array_has_the_fields_of_vllm_0_14_and_a_map_those_of_0_32() -> None:
    arrays = msgspec.msgpack.decode(encode(EVENTS, "array", 0.0))[1]
    assert [len(event) for event in arrays] == [1, 8, 8, 3, 3, 8]
    maps = msgspec.msgpack.decode(encode(EVENTS, "map", 0.0))[1]
    further = [{key: value for key, value in event.items() if key in FURTHER} for event in maps]
    kind = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert further == [
        {},
        {"extra_keys": [None, None], **kind},
        {"extra_keys": [["a"]], **kind},  # a salt is a key of a prompt's first block alone
        {"group_idx": 0},
        {"group_idx": 0},
        {"extra_keys": [["a", "pepper"], ["a"]], **kind},
    ]


# --- sockets ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def publishing(**settings: object) -> AsyncIterator[Publisher]:
    section = KvEventsSettings.model_validate({"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", **settings})
    publisher = Publisher(section, "worker-0", "Llama-3-8B", WorkerMetrics(CollectorRegistry(), "worker-0", 1000))
    publisher.listen()
    async with publisher:
        replaying = asyncio.create_task(publisher.replay())
        yield publisher
        replaying.cancel()
        await asyncio.gather(replaying, return_exceptions=True)


Open = Callable[[int], zmq.asyncio.Socket]


@pytest.fixture
def open_socket() -> Iterator[Open]:
    """Return what opens a socket of a kind; the test's end closes it."""
    with ExitStack() as stack:
        context = zmq.asyncio.Context()
        stack.callback(context.term)

        def open_one(kind: int) -> zmq.asyncio.Socket:
            socket = context.socket(kind)
            stack.callback(socket.close, linger=0)
            return socket

        yield open_one


def removal(block_hash: int) -> pb.KvEvents:
    return pb.KvEvents(block_size=2, events=[pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=[block_hash]))])


async def receive(socket: zmq.asyncio.Socket) -> list[bytes]:
    async with asyncio.timeout(60):
        return await socket.recv_multipart()


async def heard(publisher: Publisher, sub: zmq.asyncio.Socket) -> list[bytes]:
    """Publish until the subscription has arrived; return the message that has."""
    async with asyncio.timeout(60):
        while not await sub.poll(20):
            publisher.publish(removal(0))
    return await receive(sub)


async def test_a_message_is_topic_number_and_payload(open_socket: Open) -> None:
    async with publishing(topic="kv@{worker}@{model}") as publisher:
        sub = open_socket(zmq.SUB)
        sub.subscribe(b"kv@")
        sub.connect(publisher.source("127.0.0.1").endpoint)
        topic, number, _ = await heard(publisher, sub)
        assert topic == b"kv@worker-0@Llama-3-8B"
        assert publisher.source("10.0.0.7").topic == topic.decode()
        publisher.publish(EVENTS)
        expected = msgspec.msgpack.decode(encode(EVENTS, "map", 0.0))[1]
        while msgspec.msgpack.decode((message := await receive(sub))[2])[1] != expected:
            assert int.from_bytes(message[1], "big") == int.from_bytes(number, "big") + 1
            number = message[1]


async def test_a_replay_has_what_is_kept_from_the_number_on_and_an_end(open_socket: Open) -> None:
    async with publishing(buffer_steps=100) as publisher:
        for number in range(250):
            publisher.publish(removal(number))
        for first, expected in ((0, range(150, 250)), (240, range(240, 250)), (250, range(0))):
            dealer = open_socket(zmq.DEALER)
            dealer.connect(publisher.source("127.0.0.1").replay_endpoint)
            await dealer.send_multipart((b"not", b"a", b"request"))  # ignored
            await dealer.send_multipart((b"", b"short"))
            await dealer.send_multipart((b"", first.to_bytes(8, "big")))
            numbers = []
            while (message := await receive(dealer))[2] != END:
                empty, topic, number, payload = message
                assert empty == topic == b""
                numbers.append(int.from_bytes(number, "big"))
                assert msgspec.msgpack.decode(payload)[1] == [
                    {"type": "BlockRemoved", "block_hashes": [numbers[-1]], "medium": "GPU", "group_idx": 0}
                ]
            assert message == [b"", b"", END, b""]
            assert numbers == list(expected)


@pytest.mark.parametrize("named", [True, False])
async def test_a_replay_names_the_topic_unless_it_is_as_in_older_versions_of_vllm(
    named: bool, open_socket: Open
) -> None:
    async with publishing(topic="kv", replay_topic=named) as publisher:
        publisher.publish(removal(1))
        request = open_socket(zmq.REQ)
        request.connect(publisher.source("127.0.0.1").replay_endpoint)
        await request.send((0).to_bytes(8, "big"))
        *topic, number, _ = await receive(request)
        assert (topic, number) == ([b"kv"] if named else [], bytes(8))


async def test_an_endpoint_with_a_host_is_connected_to_where_a_router_listens(open_socket: Open) -> None:
    sub = open_socket(zmq.SUB)
    sub.subscribe(b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    async with publishing(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None) as publisher:
        assert await heard(publisher, sub)
        source = publisher.source("10.0.0.7")
        assert (source.endpoint, source.connects) == (f"tcp://127.0.0.1:{port}", True)


async def test_an_empty_cache_is_said_once_until_something_may_be_in_it(open_socket: Open) -> None:
    async with publishing() as publisher:
        for _ in range(2):
            publisher.clear()
        publisher.publish(EVENTS)
        for _ in range(2):
            publisher.clear()
        request = open_socket(zmq.DEALER)
        request.connect(publisher.source("127.0.0.1").replay_endpoint)
        await request.send_multipart((b"", bytes(8)))
        kinds = []
        while (message := await receive(request))[2] != END:
            kinds.append([event["type"] for event in msgspec.msgpack.decode(message[3])[1]])
        assert kinds[1:] == [["AllBlocksCleared"]]  # none at the start: nothing has been published
        assert len(kinds) == 2


async def test_a_port_that_is_taken_is_an_error_that_names_the_setting() -> None:
    async with publishing(replay_endpoint=None) as publisher:
        taken = publisher.source("127.0.0.1").endpoint
        with pytest.raises(LorreryError, match=rf"worker\.kv_events\.endpoint: {taken} cannot be taken: .*in use"):
            async with publishing(endpoint=taken, bind=True):
                pass


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["worker.kv_events.endpoint='5557'"], "tcp://HOST:PORT"),
        (["worker.kv_events.endpoint='tcp://*:70000'"], "65535"),
        (["worker.kv_events.replay_endpoint='tcp://*:5558'"], "needs endpoint"),
        (["worker.kv_events.endpoint='tcp://router:0'"], "bind = true"),
        (["worker.kv_events.endpoint='tcp://*:5557'", "worker.kv_events.bind=false"], "bind = true"),
        (["worker.kv_events.endpoint='tcp://*:5557'"], "kind = 'blocks'"),
        (["worker.kv_events.endpoint='tcp://*:5557'", "scheduler.prefix_cache.kind='none'"], "kind 'none'"),
    ],
)
def test_settings_that_cannot_be_say_what_to_do(overrides: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load(None, overrides)


def test_an_empty_endpoint_is_none() -> None:
    assert changed(load(), ["worker.kv_events.endpoint=''"]).worker.kv_events.endpoint is None
