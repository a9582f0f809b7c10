"""256 streams at once for a while: each ends with the tokens it asked for, in order, none lost, none twice."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, client_of, mixed_asks
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster

pytestmark = pytest.mark.cluster

AT_ONCE = 256
START_SECONDS = 20.0
"""How long streams are begun, wall time; all are open until then, and the last ones end a quarter of a minute later."""
ADAPTERS = ("", "lora-0", "lora-1", "lora-2", "lora-3", "big")
# Steps of some 40 ms: two cores carry the client, the router and all the rest.
TIME_SCALE = 3


@pytest.mark.timeout(300)
async def test_256_streams_at_once_lose_and_repeat_nothing(start_cluster: StartCluster):
    cluster = await start_cluster(
        f"time_scale={TIME_SCALE}",
        # Small enough that some wait for admission.
        "scheduler.max_total_token_num=30000",
        "scheduler.batch_max_tokens=4096",
        num_workers=2,
    )
    rng = random.Random(256)
    asks = iter(mixed_asks(20_000, rng, prompt=(1, 200), output=(1, 300), adapters=ADAPTERS))
    async with client_of(cluster) as client:
        end = asyncio.get_running_loop().time() + START_SECONDS
        totals = await asyncio.gather(*(_one_after_another(cluster, client, asks, end) for _ in range(AT_ONCE)))
        num_streams, num_tokens = (sum(column) for column in zip(*totals, strict=True))
        print(f"{num_streams} streams, {num_tokens} tokens")
        assert num_streams > 2 * AT_ONCE
        await nothing_held(cluster)
    assert await scrape(cluster, "router", "lorrery_router_requests_total", outcome="ok") == num_streams
    assert await scrape(cluster, "router", "lorrery_router_output_tokens_total") == num_tokens
    assert await scrape(cluster, "scheduler", "lorrery_scheduler_output_tokens_total") == num_tokens
    made = [await scrape(cluster, name, "lorrery_worker_output_tokens_total") for name in cluster.worker_names]
    assert sum(made) == num_tokens
    assert all(made)
    assert await scrape(cluster, "scheduler", "lorrery_scheduler_requeued_sequences_total") == 0


async def _one_after_another(cluster: LocalCluster, client: Client, asks: Iterator[Ask], end: float) -> tuple[int, int]:
    """Keep one stream open until `end`; return how many streams and tokens there were."""
    num_streams = num_tokens = 0
    while asyncio.get_running_loop().time() < end:
        stream = await client.start(next(asks), timeout=120.0)
        stream.check(cluster.settings)
        client.streams.remove(stream)
        num_streams += 1
        num_tokens += len(stream.token_ids)
    return num_streams, num_tokens
