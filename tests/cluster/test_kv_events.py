"""Whoever follows a worker's KV events has a copy of its prefix cache: real processes, real sockets."""

import asyncio
import random
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc, vllm_engine_pb2_grpc

from lorrery.service.local.cluster import LocalCluster
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2
from lorrery.vllm import control_pb2, control_pb2_grpc
from tests.cluster.client import client_of
from tests.cluster.harness import running_cluster, wait_until
from tests.cluster.kv_follower import Block, Follower, GatewayFollower, cached_blocks

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).parents[2] / "docs" / "gateways.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
(EXAMPLE,) = (example for example in EXAMPLES if "zmq" in example)

ADAPTERS = ("", "lora-0", "lora-1", "x")
PREFIXES = [[prefix * 100 + index % 7 for index in range(160)] for prefix in range(4)]


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with running_cluster(
        tmp_path,
        "scheduler.policy=fcfs",
        "scheduler.memory=paged",
        "scheduler.prefix_cache.kind=blocks",
        "scheduler.max_req_input_len=300",
        "scheduler.max_req_total_len=400",
        "scheduler.max_total_token_num=1600",
        "time_scale=0.1",
        "worker.kv_events.endpoint='tcp://127.0.0.1:0'",
        "worker.kv_events.bind=true",
        "worker.kv_events.replay_endpoint='tcp://127.0.0.1:0'",
        "router.vllm_grpc=127.0.0.1:0",
        "router.smg_vllm_grpc=127.0.0.1:0",
        'router.engines=[{protocol = "sglang", listen = "127.0.0.1:0", adapter = "lora-1"}]',
        num_workers=2,
    ) as cluster:
        yield cluster


@asynccontextmanager
async def gateways(cluster: LocalCluster) -> AsyncIterator[tuple[GatewayFollower, GatewayFollower]]:
    """Follow the router as one engine: as that of all adapters, and as lora-1's alone."""
    request = common_pb2.SubscribeKvEventsRequest()
    ports = cluster.engine_addresses
    async with (
        grpc.aio.insecure_channel(ports["smg_vllm_grpc"]) as all_channel,
        grpc.aio.insecure_channel(ports["engines[0]"]) as one_channel,
        GatewayFollower(vllm_engine_pb2_grpc.VllmEngineStub(all_channel).SubscribeKvEvents(request)) as of_all,
        GatewayFollower(
            sglang_scheduler_pb2_grpc.SglangSchedulerStub(one_channel).SubscribeKvEvents(request)
        ) as of_one,
    ):
        yield of_all, of_one


async def generate(cluster: LocalCluster, rng: random.Random, count: int) -> None:
    """Send requests that share prefixes, for several adapters; every sixth is cancelled on the way."""
    async with grpc.aio.insecure_channel(cluster.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)

        async def one(index: int) -> None:
            prompt = PREFIXES[rng.randrange(4)][: rng.randrange(16, 160)] + [rng.randrange(1000) for _ in range(40)]
            call = stub.Generate(
                router_pb2.GenerateRequest(
                    token_ids=router_pb2.TokenIds(ids=prompt),
                    adapter_id=rng.choice(ADAPTERS),
                    seed=rng.getrandbits(32),
                    sampling=types_pb2.SamplingParams(max_new_tokens=rng.randrange(1, 60), ignore_eos=True),
                ),
                timeout=60,
            )
            num_messages = 0
            async for _ in call:
                num_messages += 1
                if index % 6 == 0 and num_messages == 2:
                    call.cancel()
                    return

        await asyncio.gather(*(one(index) for index in range(count)))


async def same(cluster: LocalCluster, name: str, follower: Follower) -> bool:
    return await cached_blocks(cluster, name) == follower.copy.blocks


async def all_same(
    cluster: LocalCluster, followers: dict[str, Follower], one_engine: tuple[GatewayFollower, GatewayFollower]
) -> None:
    blocks: dict[int, Block] = {}
    for name, follower in followers.items():
        await wait_until(lambda name=name, follower=follower: same(cluster, name, follower), what=f"a copy of {name}")
        blocks |= follower.copy.blocks
    of_all, of_one = one_engine
    await wait_until(lambda: of_all.blocks == blocks)
    own = {block_hash: (None, tokens) for block_hash, (name, tokens) in blocks.items() if name == "lora-1"}
    await wait_until(lambda: of_one.blocks == own)


async def sources_are_listed(cluster: LocalCluster) -> None:
    """VLLM's own gRPC says where every worker publishes."""
    async with grpc.aio.insecure_channel(cluster.engine_addresses["vllm_grpc"]) as channel:
        answer = await control_pb2_grpc.ControlStub(channel).GetKvEventSources(
            control_pb2.GetKvEventSourcesRequest(), timeout=20
        )
    announced = [cluster.processes[name].others for name in cluster.worker_names]
    assert {(source.endpoint, source.replay_endpoint) for source in answer.sources} == {
        (each["kv_events"], each["kv_events_replay"]) for each in announced
    }
    assert {(source.transport, source.encoding) for source in answer.sources} == {("zmq", "msgpack")}


async def the_example_counts(cluster: LocalCluster, follower: Follower) -> None:
    """Run the subscriber of the docs; it comes late, and has all blocks as soon as one more batch has come."""
    announced = cluster.processes["worker-0"].others
    example = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", EXAMPLE, announced["kv_events"], announced["kv_events_replay"]),
        stdout=asyncio.subprocess.PIPE,
    )
    assert example.stdout is not None
    try:
        lines: list[str] = []
        reading = asyncio.create_task(_lines(example.stdout, lines))
        rng = random.Random(1)
        while not lines:  # until its subscription has arrived
            await generate(cluster, rng, 4)
        await wait_until(
            lambda: lines[-1] == f"batch {follower.next - 1}: {len(follower.copy.blocks)} blocks are cached"
        )
    finally:
        example.kill()
        await example.wait()
        await reading


async def _lines(stream: asyncio.StreamReader, lines: list[str]) -> None:
    async for line in stream:
        lines.append(line.decode().strip())  # noqa: PERF401  each as it comes


async def test_a_copy_follows_evictions_adapters_gaps_and_the_loss_of_workers_and_the_scheduler(cluster: LocalCluster):
    rng = random.Random(7)
    async with client_of(cluster) as client, AsyncExitStack() as stack:
        followers = {
            name: await stack.enter_async_context(
                Follower(
                    cluster.processes[name].others["kv_events"], cluster.processes[name].others["kv_events_replay"]
                )
            )
            for name in cluster.worker_names
        }
        one_engine = await stack.enter_async_context(gateways(cluster))
        await sources_are_listed(cluster)
        await client.load_adapter("x", 8)
        await generate(cluster, rng, 40)
        await client.unload_adapter("x")
        await client.load_adapter("x", 16)
        await generate(cluster, rng, 40)
        await all_same(cluster, followers, one_engine)
        for follower in followers.values():
            assert follower.copy.num_removed > 20
            assert follower.copy.num_cleared == 0
        names = {name for follower in followers.values() for name, _ in follower.copy.blocks.values()}
        assert names == {None, "lora-0", "lora-1", "x"}

        deaf = followers["worker-1"]
        await deaf.be_deaf()
        num_replayed = deaf.num_replayed
        await generate(cluster, rng, 30)
        await deaf.listen()
        await all_same(cluster, followers, one_engine)
        assert deaf.num_replayed > num_replayed

        await the_example_counts(cluster, followers["worker-0"])

        before = followers["worker-0"].copy
        cluster.kill("worker-0")
        await cluster.restart("worker-0")
        await generate(cluster, rng, 40)
        await all_same(cluster, followers, one_engine)
        assert followers["worker-0"].copy is not before  # its numbers have begun again
        assert followers["worker-1"].copy.num_cleared == 0

        cluster.kill("scheduler")
        await wait_until(lambda: not any(follower.copy.blocks for follower in followers.values()))
        await wait_until(lambda: not any(follower.blocks for follower in one_engine))
        assert followers["worker-1"].copy.num_cleared == 1
        await cluster.restart("scheduler")
        for name in [*cluster.worker_names, "router"]:
            await cluster.serving(name)
        await generate(cluster, rng, 40)
        await all_same(cluster, followers, one_engine)
        assert followers["worker-1"].copy.blocks
