"""Real processes decide as vLLM's recorded scheduler does, step by step, and their journal replays.

`tests/virtual/test_recorded_order.py` plays every record that a live cluster can be asked for; here are a few of them
in real time. What is compared stands in the journal, in device time and numbers of steps. If a request has come in
another step than it had to, since this machine stood still for half a step, the run proves nothing, and another one is
made.
"""

import asyncio
import json
from pathlib import Path

import pytest

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Client, client_of
from tests.cluster.gauges import scrape
from tests.cluster.harness import PATIENCE_SECONDS, running_cluster, wait_until
from tests.cluster.live_record import send
from tests.cluster.test_journal import replayed
from tests.cluster.vllm_record import VllmRecord

pytestmark = [pytest.mark.cluster, pytest.mark.timing]

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = (
    "vllm-rule-no-admission-after-preemption",
    "vllm-rule-free-order",
    "vllm-0116-async_preemption",
)
STEP_SECONDS = 0.2
MOST_RUNS = 3


def record_of(name: str) -> VllmRecord:
    lines = [line for path in sorted(GOLDEN.glob("vllm_*.jsonl")) for line in path.read_text().splitlines()]
    (found,) = [record for record in map(json.loads, lines) if record["id"] == name]
    return VllmRecord(found)


async def run(record: VllmRecord, client: Client, cluster: LocalCluster) -> None:
    """Send a record's requests, the first of them before there is a worker; check the streams."""

    async def are_placed() -> bool:
        return await scrape(cluster, "scheduler", "lorrery_scheduler_unplaced_requests") == 0

    async def begin_worker() -> None:
        await cluster.start_worker(0.0)
        await wait_until(are_placed)

    async def taken(num_requests: int) -> None:
        num_taken = 0.0
        async with asyncio.timeout(PATIENCE_SECONDS):
            while num_taken < num_requests:
                num_ended = await scrape(
                    cluster, "scheduler", "lorrery_scheduler_requests_total"
                )  # first: open ones end
                num_taken = num_ended + await scrape(cluster, "scheduler", "lorrery_scheduler_in_flight_requests")

    for stream in await send(record, STEP_SECONDS, client.start, begin_worker, taken):
        stream.check(cluster.settings)


@pytest.mark.parametrize("name", NAMES)
async def test_real_processes_decide_as_recorded(tmp_path: Path, name: str) -> None:
    record = record_of(name)
    assert not record.why_not
    for number in range(MOST_RUNS):
        journal = tmp_path / f"journal-{number}.jsonl"
        overrides = (
            *record.overrides(),
            f"worker.constant.step_ms={1000 * STEP_SECONDS}",
            f"scheduler.journal={journal}",
        )
        async with running_cluster(tmp_path, *overrides, num_workers=0) as cluster, client_of(cluster) as client:
            await run(record, client, cluster)
        content, result = replayed(journal)
        assert result.differences == []
        assert content.complete
        if not record.misplaced(journal):
            assert record.check(journal) == []
            return
    pytest.fail(f"this machine stood still in each of {MOST_RUNS} runs")
