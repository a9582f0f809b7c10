"""Requests made to hurt: each is refused or served within its bounds, and the streams beside it do not notice."""

import random
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from lorrery.local.cluster import LocalCluster
from lorrery.v1 import router_pb2, types_pb2
from tests.cluster.client import TIMEOUT_SECONDS, Ask, Client, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

INNOCENT = Ask(seed=5, prompt_tokens=100, max_new_tokens=1000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all attacks."""
    async with running_cluster(tmp_path_factory.mktemp("cluster"), num_workers=2) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def attacked(shared_cluster: LocalCluster) -> AsyncIterator[Client]:
    """A client for the attack; streams run beside it, which end well, and no service's stream breaks."""
    async with client_of(shared_cluster) as innocents, client_of(shared_cluster) as client:
        streams = [innocents.start(INNOCENT) for _ in range(4)]
        for stream in streams:
            await stream.at(1)
        yield client
        streams.append(innocents.start(INNOCENT))
        for stream in streams:
            assert (await stream).check(shared_cluster.settings).num_requeues == 0
    await nothing_held(shared_cluster)
    assert await scrape(shared_cluster, "router", "lorrery_router_resumed_total") == 0
    assert await scrape(shared_cluster, "scheduler", "lorrery_scheduler_workers_lost_total") == 0


async def test_sixty_requests_with_twenty_thousand_stop_strings_each(attacked: Client) -> None:
    stops = [chr(33 + index % 90) for index in range(20_480)]
    request = router_pb2.GenerateRequest(text="hello", sampling=types_pb2.SamplingParams(stop_sequences=stops))
    for _ in range(60):
        code, message = await attacked.failure(request)
        assert (code, message) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "stop_sequences has 20480 strings; max_stop_strings is 64; give fewer",
        )


async def test_sixty_requests_with_all_the_stop_strings_that_are_allowed(attacked: Client) -> None:
    rng = random.Random(1)
    calls = []
    for seed in range(60):
        stops = ["".join(chr(rng.randrange(97, 123)) for _ in range(64)) for _ in range(64)]
        request = router_pb2.GenerateRequest(
            text="hello",
            seed=seed,
            sampling=types_pb2.SamplingParams(stop_sequences=stops, max_new_tokens=200, ignore_eos=True),
        )
        calls.append(attacked.stub.Generate(request, timeout=TIMEOUT_SECONDS))
    for call in calls:
        messages = [message async for message in call]
        assert messages[-1].finish.usage.completion_tokens == 200
