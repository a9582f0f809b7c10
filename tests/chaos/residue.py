"""What must be true once quiet has come back: nothing is held, all agree, and what is counted is counted right."""

import asyncio
import json
import urllib.request
from contextlib import AsyncExitStack

from lorrery.service.network.credentials import bearer
from lorrery.v1 import router_pb2
from tests.chaos.clients import listed_adapters
from tests.chaos.cluster import ROUTERS, SCHEDULERS, WORKERS, ChaosCluster
from tests.cluster.client import Ask, Client, Stream
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import wait_until

QUIET_SECONDS = 30.0
"""Within which every gauge returns to nothing; sequences of a router that was stopped may have to be heard of first."""
NUM_PROBES = 24
PROBED = ("", "lora-0", "lora-1", "lora-2", "lora-3")


async def check_quiet(chaos: ChaosCluster) -> list[str]:
    """Return what is wrong with a cluster that nothing runs in."""
    wrong: list[str] = []
    for check in (_all_attached, _nothing_held, _nothing_pinned, _all_agree, _counts_are_right, _quota_is_free):
        try:
            await check(chaos)
        except AssertionError as error:
            wrong.append(f"after the end: {error}")
    return wrong


async def _all_attached(chaos: ChaosCluster) -> None:
    async def all_there() -> bool:
        attached = [
            await scrape(chaos.cluster, name, "lorrery_scheduler_workers", state="ready") for name in SCHEDULERS
        ]
        connected = [await scrape(chaos.cluster, name, "lorrery_router_shard_connected") for name in ROUTERS]
        routers = [await scrape(chaos.cluster, name, "lorrery_scheduler_routers") for name in SCHEDULERS]
        return (
            sum(attached) == len(WORKERS)
            and connected == [len(SCHEDULERS)] * len(ROUTERS)
            and routers == [len(ROUTERS)] * len(SCHEDULERS)
        )

    await wait_until(all_there, QUIET_SECONDS, "every worker attached, every router connected to every scheduler")


async def _nothing_held(chaos: ChaosCluster) -> None:
    await nothing_held(chaos.cluster, timeout_seconds=QUIET_SECONDS)


async def _nothing_pinned(chaos: ChaosCluster) -> None:
    """Blocks of the pool are free, or cached and reclaimable: adapters have places of their own."""
    for name in SCHEDULERS:
        used = await scrape(chaos.cluster, name, "lorrery_scheduler_worker_kv_blocks", state="used")
        assert not used, f"{used:.0f} blocks of {name}'s workers are in use by nothing"


async def _all_agree(chaos: ChaosCluster) -> None:
    """Every router lists the same adapters, under the same ranks."""

    async def lists() -> list[dict[str, int]]:
        found = []
        for name in ROUTERS:
            async with Client(chaos.address(name)) as client:
                request = router_pb2.ListAdaptersRequest()
                answer = await client.stub.ListAdapters(request, timeout=20, metadata=bearer("root-secret"))
                found.append(listed_adapters(answer))
        return found

    async def they_agree() -> bool:
        first, *others = await lists()
        return all(other == first for other in others)

    await wait_until(they_agree, QUIET_SECONDS, "all routers list the same adapters")


async def _counts_are_right(chaos: ChaosCluster) -> None:
    """A few more streams count as what they are, in every router and scheduler."""

    async def counts() -> tuple[float, float, float]:
        ended = [await scrape(chaos.cluster, name, "lorrery_router_requests_total", outcome="ok") for name in ROUTERS]
        given = [await scrape(chaos.cluster, name, "lorrery_router_output_tokens_total") for name in ROUTERS]
        made = [await scrape(chaos.cluster, name, "lorrery_scheduler_output_tokens_total") for name in SCHEDULERS]
        return sum(ended), sum(given), sum(made)

    before = await counts()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(chaos.address(name))) for name in ROUTERS]
        streams = [
            _stream(clients[number % 3], Ask(number, 20 + number, 10 + number, PROBED[number % 5]), "acme")
            for number in range(NUM_PROBES)
        ]
        tokens = sum([(await stream).check(chaos.cluster.settings).completion_tokens for stream in streams])
    after = await counts()
    got = tuple(int(late - early) for early, late in zip(before, after, strict=True))
    assert got == (NUM_PROBES, tokens, tokens), f"{NUM_PROBES} streams with {tokens} tokens count as {got}"


async def _quota_is_free(chaos: ChaosCluster) -> None:
    """A key that may run three and let three wait may do so on each shard: no request of before counts still."""
    for number in range(4):
        asks = [Ask(seed, 8, 40, f"lora-{number}") for seed in range(6)]
        async with Client(chaos.address(ROUTERS[0])) as client:
            running = [_stream(client, ask, "narrow") for ask in asks[:3]]
            await asyncio.gather(*(stream.at(1) for stream in running))
            held = [_stream(client, ask, "narrow") for ask in asks[3:]]
            for stream in (*running, *held):
                (await stream).check(chaos.cluster.settings)


def _stream(client: Client, ask: Ask, key: str) -> Stream:
    return Stream(ask, client.stub.Generate(ask.message(), timeout=60, metadata=bearer(f"{key}-secret")))


async def snapshot(chaos: ChaosCluster) -> str:
    """Return every gauge that is not zero, for people to read after a failure."""
    shown = {}
    for name in chaos.cluster.processes:
        try:
            text = await asyncio.to_thread(_metrics, chaos.cluster.metrics_address(name))
        except OSError as error:
            text = str(error)
        shown[name] = [
            line
            for line in text.splitlines()
            if line.startswith("lorrery_") and not line.endswith(" 0.0") and "_bucket" not in line
        ]
    return json.dumps(shown, indent=1)


def _metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        text: str = response.read().decode()
    return text
