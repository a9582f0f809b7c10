"""What real processes did is replayed from the scheduler's journal, to the picosecond."""

import asyncio
import json
import random
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lorrery.cli.journal import replay_journal
from lorrery.simulator.replay.journal import Journal, read_journal
from lorrery.simulator.replay.parts import Replayed, parts_of
from lorrery.simulator.replay.replay import replay
from tests.cluster.client import Ask, Client, Stream, client_of, mixed_asks
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster, wait_until

pytestmark = pytest.mark.cluster

NUM_STREAMS = 48
BRIEF_RANKS = (8, 16, 8)
ADAPTERS = ("", "lora-0", "lora-1", "lora-2", "lora-3", "big")
FAULTS = json.dumps(
    [
        *(f"slow_worker,at={at},worker=worker-0,factor=1.7,for=1" for at in range(0, 120, 2)),
        "adapter_load_failure,at=0,adapter=big,for=100",
    ]
)
MIXED = 'workers=[{gpu = "H100-SXM"}, {gpu = "L40S", tensor_parallel = 2, weight_dtype = "fp8", startup_seconds = 0.5}]'
SETTINGS = (
    "scheduler.worker_timeout_seconds=60",  # a worker that is merely starved of CPU is not lost
    "adapters.max_loras=2",
    "adapters.max_cpu_loras=3",
)


def replayed(path: Path) -> tuple[Journal, Replayed]:
    journal = read_journal(path)
    return journal, replay(journal, parts_of(journal, path))


async def start_over_time(client: Client, asks: list[Ask], rng: random.Random) -> list[Stream]:
    """Start streams one after another, and cancel every sixth."""
    streams = []
    for number, ask in enumerate(asks):
        streams.append(client.start(ask))
        if number % 6 == 5:
            asyncio.get_running_loop().call_later(rng.uniform(0.0, 1.5), streams[-1].cancel)
        await asyncio.sleep(rng.expovariate(50))  # the workload's gaps; nothing is waited for
    return streams


async def test_a_run_with_loads_cancels_and_a_killed_worker_is_replayed_exactly(tmp_path: Path):
    path, rng = tmp_path / "journal.jsonl", random.Random(20231116)
    overrides = (*SETTINGS, "scheduler.policy=fcfs", f"scheduler.journal={path}")
    async with running_cluster(tmp_path, *overrides, num_workers=2) as cluster, client_of(cluster) as client:
        await client.load_adapter("late", 32)
        asks = mixed_asks(NUM_STREAMS, rng, prompt=(1, 400), output=(20, 120), adapters=(*ADAPTERS, "late"))
        streams = await start_over_time(client, asks, rng)
        for rank in BRIEF_RANKS:
            await client.load_adapter("brief", rank)
            streams.append(client.start(Ask(rng.getrandbits(64), 20, 40, "brief")))
            await streams[-1].at(1)
            await client.unload_adapter("brief")
        # Enough that worker-0 has some, long enough that they still run when it is killed, and the last is cancelled.
        streams += [client.start(Ask(rng.getrandbits(64), 20, 600)) for _ in range(8)]
        await asyncio.gather(*(stream.at(5) for stream in streams[-8:]))
        streams[-1].cancel()
        cluster.kill("worker-0")
        await cluster.restart("worker-0")
        await asyncio.gather(*streams)
        requeues = sum(stream.check(cluster.settings).num_requeues for stream in streams if not stream.cancelled)
        await nothing_held(cluster)
        num_tokens = await scrape(cluster, "scheduler", "lorrery_scheduler_output_tokens_total")
        num_loads = await scrape(cluster, "scheduler", "lorrery_scheduler_adapter_loads_total")
        num_late = await scrape(cluster, "scheduler", "lorrery_scheduler_late_interrupts_total")
        num_requests = await scrape(cluster, "scheduler", "lorrery_scheduler_requests_total")
    journal, result = replayed(path)
    assert result.differences == []
    assert journal.complete
    counted = (result.num_requests, result.num_tokens, result.num_late)
    assert counted == (num_requests, num_tokens, num_late)
    assert num_requests > NUM_STREAMS * 5 / 6  # a cancel may overtake its request, which then never gets there
    assert result.num_workers == 3
    assert sum(line.type == "retire" for line in journal.inputs) >= len(BRIEF_RANKS)
    assert sum(line.type == "load" for line in journal.inputs) >= len(BRIEF_RANKS)
    assert result.num_cancels > 0
    assert requeues > 0
    assert num_loads > len(ADAPTERS)

    # The same file, with one time a picosecond shorter.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    number, steps = next((n, line) for n, line in enumerate(lines, start=1) if line.get("type") == "steps")
    steps["durations_ps"][0] -= 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = StringIO()
    assert replay_journal(path, Console(file=out, width=500)) == 1
    assert f"{path}:{number}: step: end_ps is " in out.getvalue()


async def test_a_killed_schedulers_journal_is_good_up_to_its_last_flush(tmp_path: Path):
    path, rng = tmp_path / "journal.jsonl", random.Random(7)
    overrides = (*SETTINGS, "scheduler.policy=fcfs", f"scheduler.journal={path}")
    async with running_cluster(tmp_path, *overrides) as cluster, client_of(cluster) as client:
        asks = [Ask(rng.getrandbits(64), rng.randint(1, 200), 500, name) for name in ADAPTERS]
        streams = [client.start(ask) for ask in asks]
        await wait_until(lambda: '"type":"steps"' in path.read_text(), what="steps in the journal")
        cluster.kill("scheduler")
        await cluster.restart("scheduler")
        await asyncio.gather(*streams)
        for stream in streams:
            stream.check(cluster.settings)
    first, result = replayed(tmp_path / "journal.jsonl.1")
    assert result.differences == []
    assert not first.complete
    assert result.num_steps > 0
    # What the first scheduler had given out comes back with the resubmitted requests.
    second, result = replayed(path)
    assert result.differences == []
    assert second.complete
    assert any(line.content.get("produced_token_ids") for line in second.inputs)


@pytest.mark.parametrize(
    "way",
    [
        ("scheduler.policy=req_queue", "scheduler.strict=true"),
        ("scheduler.policy=fcfs", "scheduler.batching=chunked", "scheduler.max_num_batched_tokens=128"),
        (
            "scheduler.policy=fcfs",
            "scheduler.memory=paged",
            "scheduler.max_req_input_len=600",
            "scheduler.max_req_total_len=1024",
            "scheduler.max_total_token_num=1024",
        ),
        ("scheduler.policy=fcfs", "scheduler.prefix_cache.kind=blocks", "scheduler.max_total_token_num=4096"),
        ("scheduler.policy=fcfs", f"faults={FAULTS}"),
        (MIXED, "scheduler.placement=predicted_finish"),
        ("engine=sglang",),
    ],
    ids=["slora strict", "chunked", "paged", "blocks", "faults", "mixed fleet", "engine"],
)
async def test_every_way_to_batch_is_replayed_exactly(tmp_path: Path, way: tuple[str, ...]):
    path, rng = tmp_path / "journal.jsonl", random.Random(3)
    overrides = (*SETTINGS, *way, "time_scale=0.2", f"scheduler.journal={path}")
    async with running_cluster(tmp_path, *overrides) as cluster, client_of(cluster) as client:
        asks = mixed_asks(30, rng, prompt=(16, 500), output=(20, 200), adapters=ADAPTERS)
        streams = await start_over_time(client, asks, rng)
        await asyncio.gather(*streams)
        num_preempted = await scrape(cluster, "scheduler", "lorrery_scheduler_preemptions_total")
    journal, result = replayed(path)
    assert result.differences == []
    assert journal.complete
    assert result.num_requests == 30
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if "scheduler.memory=paged" in way:
        assert num_preempted > 0
    if MIXED in way:
        hellos = [line["hello"] for line in lines if line.get("type") == "attached"]
        assert {(one["worker_id"], one["gpu"], one["tensor_parallel"]) for one in hellos} == {
            ("worker-0", "H100-SXM", 1),
            ("worker-1", "L40S", 2),
        }
        assert len({one["max_total_token_num"] for one in hellos}) == 2
        assert result.num_derived > 0
    if f"faults={FAULTS}" in way:
        # Every other second is slow; without the faults the journal is not what the device says.
        lines[0]["settings"]["faults"] = []
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert replayed(path)[1].differences
    if "scheduler.prefix_cache.kind=blocks" in way:
        assert any(
            cached for line in path.read_text().splitlines() for _, cached in json.loads(line).get("admitted", ())
        )
