"""One router, scheduler and worker in virtual time that are asked for what a record of a real scheduler has.

Nothing goes wrong on these hosts, and messages take a small part of a step, so that every request comes in its step.
"""

import asyncio
import random
from pathlib import Path

import pytest

from lorrery.service.settings.cluster import load
from lorrery.simulator.replay.journal import read_journal
from lorrery.simulator.replay.parts import parts_of
from lorrery.simulator.replay.replay import replay
from lorrery.v1 import router_pb2_grpc, scheduler_pb2_grpc
from lorrery.v1 import scheduler_pb2 as pb
from tests.cluster.client import Ask, Stream
from tests.cluster.live_record import LiveRecord, send, told_of
from tests.virtual.clock import Host, virtual_time
from tests.virtual.network import Channel, Network
from tests.virtual.processes import Process, read_disk_once

STEP_SECONDS = 0.4
LATENCY_SECONDS = 0.0001
MOST_STEPS = 230
"""In a record that is played: a client of these tests waits for 100 seconds at most."""
COMMON = (
    "worker.gpu='H100-SXM'",
    f"worker.constant.step_ms={1000 * STEP_SECONDS}",
    "scheduler.worker_timeout_seconds=30",
    "router.http=",
)


def differences(record: LiveRecord, journal: Path) -> list[object]:
    """Play a record; return what is wrong with its streams, its decisions, and the replay of its journal."""
    wrong: list[object] = [*run_record(record, journal)]
    wrong += record.misplaced(journal) or record.check(journal)
    content = read_journal(journal)
    result = replay(content, parts_of(content, journal))
    assert result.num_steps == len(record.steps)
    return [*wrong, *result.differences, *(["an input took effect late"] if result.num_late else [])]


def run_record(record: LiveRecord, journal: Path) -> list[str]:
    """Ask for a record's requests; return what is wrong with their streams. The scheduler writes `journal`."""
    rng = random.Random(record.name)
    overrides = [*COMMON, *record.overrides(), f"scheduler.journal='{journal}'"]
    with virtual_time(rng) as loop, pytest.MonkeyPatch.context() as patch:
        read_disk_once(patch)
        network = Network(loop, rng, LATENCY_SECONDS)
        patch.setattr("grpc.aio.insecure_channel", network.channel)
        settings = load(None, overrides)
        own = {
            "scheduler": [],
            "router": ["router.schedulers=['scheduler:1']"],
            "worker": ["worker.name='worker'", "worker.scheduler='scheduler:1'"],
        }
        scheduler, router, worker = (
            Process(kind, name, load(None, [*overrides, *own[kind]]), network, loop, 0.0)
            for kind, name in (("scheduler", "scheduler:1"), ("router", "router:1"), ("worker", "worker"))
        )
        client = Host(loop, "client")
        stub = router_pb2_grpc.RouterServiceStub(Channel(network, router.name))

        def ask(what: Ask) -> Stream:
            return Stream(what, stub.Generate(what.message(), wait_for_ready=True))

        async def begin_worker() -> None:
            await asyncio.sleep(STEP_SECONDS)
            worker.begin()
            async with asyncio.timeout(STEP_SECONDS):
                while not any(one._running for one in scheduler.service._cluster.workers.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

        async def taken(num_requests: int) -> None:
            async with asyncio.timeout(STEP_SECONDS):
                while scheduler.service._cluster.requests._num_handles < num_requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

        batches: list[pb.KvEvents] = []

        async def follow_kv_events() -> None:
            watching = scheduler_pb2_grpc.SchedulerServiceStub(Channel(network, scheduler.name))
            call = watching.WatchKvEvents(pb.WatchKvEventsRequest(), wait_for_ready=True)
            while isinstance(message := await call.read(), pb.WatchKvEventsResponse):
                batches.append(message.events)

        async def play() -> list[Stream]:
            scheduler.begin()
            router.begin()
            if record.kv_events is not None:
                client.run(follow_kv_events())
                await asyncio.sleep(STEP_SECONDS)
            task = client.run(send(record, STEP_SECONDS, ask, begin_worker, taken))
            streams = await task
            await asyncio.sleep(2 * STEP_SECONDS)
            return streams

        streams = loop.run_until_complete(play())
        scheduler.service._cluster.close_journal()
        wrong = [] if record.kv_events is None else wrong_batches(told_of(batches), record.kv_events)
        for stream in streams:
            try:
                stream.check(settings)
            except AssertionError as error:
                wrong.append(str(error))
        for process in (scheduler, router, worker):
            process.kill()
            process.look()
            wrong += process.escaped
        while tasks := asyncio.all_tasks(loop):
            for one in tasks:
                one.cancel()
            loop.run_until_complete(asyncio.wait(tasks))
        return wrong


def wrong_batches(got: list[list[object]], expected: list[list[object]]) -> list[str]:
    """Return where batches of KV events differ first; empty: nowhere."""
    for number, (one, other) in enumerate(zip(got, expected, strict=False)):
        if one != other:
            return [f"KV events, batch {number}: got {one}, recorded {other}"]
    return [] if len(got) == len(expected) else [f"{len(got)} batches of KV events, recorded {len(expected)}"]
