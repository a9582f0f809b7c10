"""`lorrery up --autoscale`: processes come and go and are lost under load, no token is, and the journal replays."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lorrery.simulator.replay.journal import read_journal
from lorrery.simulator.replay.parts import parts_of
from lorrery.simulator.replay.replay import replay
from tests.cli.test_up import Up
from tests.cluster.client import Ask, Client, Stream
from tests.cluster.harness import write_settings

pytestmark = pytest.mark.cluster

RULE = (
    "autoscaler.metric=num_requests_running",
    "autoscaler.target=4",
    "autoscaler.max_replicas=2",
    "autoscaler.sync_period_seconds=2",
    "autoscaler.start_seconds=0",
    "autoscaler.disk_gb_per_second=100",
    "autoscaler.scale_down_stabilization_seconds=40",
    "time_scale=0.1",
)


@contextlib.asynccontextmanager
async def asked_on(client: Client, num_streams: int) -> AsyncIterator[list[Stream]]:
    """Have so many requests under way, one after another, until the end; yields all of them, as far as they are."""
    streams: list[Stream] = []
    over = asyncio.Event()

    async def ask_on(number: int) -> None:
        while not over.is_set():
            streams.append(stream := client.start(Ask(number, max_new_tokens=100)))
            await stream
            assert stream.finish is not None, stream.error

    async with asyncio.TaskGroup() as asking:
        for number in range(num_streams):
            asking.create_task(ask_on(number))
        yield streams
        over.set()


async def test_workers_come_under_load_and_go_after_it_and_the_journal_replays(tmp_path: Path):
    journal = tmp_path / "journal.jsonl"
    settings = [part for one in (*RULE, f"scheduler.journal={journal}") for part in ("--set", one)]
    config = str(write_settings(tmp_path))
    up = await Up.start("--autoscale", "--config", config, "--workers", "1", "--no-web", *settings)
    try:
        target = (await up.wait_for("try: lorrery load --target")).split()[-1]
        async with Client(target) as client:
            async with asked_on(client, 12) as streams:
                assert "from 1 to 2 workers" in await up.wait_for("target 4 each")
                await up.wait_for("worker-1 serves; 2 workers")
                late = await client.start(Ask(99, max_new_tokens=8))
                assert late.finish is not None, late.error
            await up.wait_for("worker-1 drains; 1 workers")
            await up.wait_for("worker_left")
            after = await client.start(Ask(100, max_new_tokens=8))
            assert after.finish is not None, after.error
            assert after.finish.usage.worker_id == "worker-0"
        up.process.send_signal(signal.SIGINT)
        assert await up.end() == 0, "".join(up.lines)
    finally:
        await up.gone()
    read = read_journal(journal)
    found = replay(read, parts_of(read, journal))
    assert found.differences == []
    assert (found.num_workers, found.num_requests) == (2, len(streams) + 2)


async def test_a_worker_that_is_killed_twice_comes_back_by_its_name_and_the_journal_replays(tmp_path: Path):
    journal = tmp_path / "journal.jsonl"
    fixed = ("autoscaler.min_replicas=2", f"scheduler.journal={journal}")
    settings = [part for one in (*RULE, *fixed) for part in ("--set", one)]
    losses = [part for at in (0, 120) for part in ("--fault", f"worker_loss,at={at},worker=worker-0")]
    config = str(write_settings(tmp_path))
    up = await Up.start("--autoscale", "--config", config, "--workers", "2", "--no-web", *settings, *losses)
    try:
        target = (await up.wait_for("try: lorrery load --target")).split()[-1]
        async with Client(target) as client, asked_on(client, 4):
            for _ in losses[::2]:
                await up.wait_for("worker-0 is killed")
            await up.wait_for("worker-0 serves; 2 workers")
        up.process.send_signal(signal.SIGINT)
        assert await up.end() == 0, "".join(up.lines)
    finally:
        await up.gone()
    read = read_journal(journal)
    found = replay(read, parts_of(read, journal))
    assert found.differences == []
    assert found.num_workers in (3, 4)  # 3: on a slow machine the second loss takes one that still starts
