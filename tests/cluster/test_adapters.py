"""Adapters that are loaded and unloaded while requests run: real processes, two routers, two schedulers, restarts."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from openai import AsyncOpenAI

from lorrery.service.local.cluster import LocalCluster
from lorrery.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.cluster.client import Ask, Client, Stream, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster, wait_until
from tests.cluster.http_client import exchange, json_of, status_of
from tests.router.adapter_folder import write_adapter

pytestmark = pytest.mark.cluster

LONG = 600
ENDLESS = 3000
"""Half a minute: what must still run when something else is seen."""


async def _add_router(cluster: LocalCluster, *schedulers: str) -> str:
    addresses = ", ".join(f'"{cluster.processes[name].grpc}"' for name in schedulers or ("scheduler",))
    await cluster.add("router-1", "router", [f"router.schedulers=[{addresses}]"])
    await cluster.serving("router-1")
    return cluster.processes["router-1"].grpc


async def _one_token(client: Client, adapter_id: str) -> Stream:
    stream = client.start(Ask(1, 8, 1, adapter_id))
    await stream
    return stream


async def _knows(client: Client, adapter_id: str, rank: int | None) -> None:
    """Wait until the cluster's list has an adapter with this rank, or has it not."""

    async def so() -> bool:
        try:
            return (await client.adapters()).get(adapter_id) == rank
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:  # a scheduler that restarts
                raise
            return False

    await wait_until(so, what=f"{adapter_id} has rank {rank}")


async def _resident(cluster: LocalCluster, scheduler: str) -> list[str]:
    """Return the adapters on the GPU of a scheduler's only worker."""
    async with grpc.aio.insecure_channel(cluster.processes[scheduler].grpc) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        (worker,) = (await stub.GetStatus(scheduler_pb2.GetStatusRequest(no_adapters=True))).workers
        return list(worker.resident_adapters)


async def test_an_adapter_loaded_again_under_another_rank_while_the_old_one_runs(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", "scheduler.prefix_cache.kind=blocks")
    async with client_of(cluster) as client:
        streams = []
        for rank in (8, 64, 16, 8):
            await client.load_adapter("x", rank)
            streams += [client.start(Ask(seed, 64, length, "x")) for seed, length in enumerate((LONG, ENDLESS) * 2)]
            await asyncio.gather(*(stream.at(3) for stream in streams))
            await client.unload_adapter("x")
            assert "x" not in await client.adapters()
        endless = [stream for stream in streams if stream.ask.max_new_tokens == ENDLESS]
        assert not any(stream.over for stream in endless)
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_adapter_loads_total") == 4
        for stream in streams:
            if stream in endless:
                stream.check_so_far(cluster.settings)
                stream.cancel()
                continue
            # Of the same prompt under the rank before nothing counts as computed.
            assert (await stream).check(cluster.settings).cached_tokens % 64 < 64
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_workers_lost_total") == 0

        async def all_gone() -> bool:
            return await scrape(cluster, "worker-0", "lorrery_worker_resident_adapters") == 0

        await wait_until(all_gone, what="adapters out of use have left the GPU with the last who had them")
    await nothing_held(cluster)


async def test_what_runs_keeps_its_adapter_through_the_loss_of_worker_and_scheduler(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs", num_workers=2)
    async with client_of(cluster) as client:
        await client.load_adapter("x", 8)
        old = [client.start(Ask(seed, 20, LONG, "x")) for seed in range(6)]
        await asyncio.gather(*(stream.at(3) for stream in old))
        await client.unload_adapter("x")
        cluster.kill("worker-0")
        await asyncio.gather(*(stream.at(len(stream.token_ids) + 20) for stream in old))
        await client.load_adapter("x", 32)
        new = [client.start(Ask(seed, 20, LONG, "x")) for seed in range(6)]
        await asyncio.gather(*(stream.at(3) for stream in new))
        await client.unload_adapter("x")
        cluster.kill("scheduler")
        await cluster.restart("scheduler")
        for stream in (*old, *new):
            (await stream).check(cluster.settings)
        assert "x" not in await client.adapters()
    await nothing_held(cluster, without=["worker-0"])


async def test_what_one_router_loads_and_unloads_all_know_whoever_restarts(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs")
    other_address = await _add_router(cluster)
    async with client_of(cluster) as client:
        async with Client(other_address) as other:
            await client.load_adapter("x", 8)
            await client.load_adapter("y", 8)
            await other.unload_adapter("x")
            await other.load_adapter("x", 32)
            await client.unload_adapter("y")
            await other.unload_adapter("lora-0")
            (await _one_token(client, "x")).check(cluster.settings)
        # The scheduler is back before either router; which one it hears first is left to chance.
        cluster.kill("scheduler")
        await cluster.restart("scheduler")
        await _knows(client, "x", 32)
        assert not {"y", "lora-0"} & set(await client.adapters())
        # A router that comes back with nothing takes nothing away; a scheduler then learns from the other one.
        cluster.kill("router")
        await cluster.restart("router")
        async with client_of(cluster) as again:
            await _knows(again, "x", 32)
            cluster.kill("router-1")
            cluster.kill("scheduler")
            await cluster.restart("scheduler")
            await _knows(again, "x", 32)
            assert not {"y", "lora-0"} & set(await again.adapters())


async def test_a_card_has_the_folder_of_the_settings_or_of_a_load_through_this_router(start_cluster: StartCluster):
    cluster = await start_cluster("adapters.registry=[{id='listed', rank=8, path='/adapters/listed'}]")
    await _add_router(cluster)

    async def roots(name: str) -> dict[str, str]:
        base_url = f"http://{cluster.processes[name].http}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            found = {card.id: (card.model_extra or {})["root"] for card in (await client.models.list()).data}
            one = await client.models.retrieve("late")
        assert (one.model_extra or {})["root"] == found["late"]
        del found["Llama-3-8B"]
        return found

    async def load(**fields: object) -> None:
        body = {"lora_name": "late", "rank": 8, "load_inplace": True, **fields}
        assert status_of(await exchange(cluster, "POST", "/v1/load_lora_adapter", body)) == 200

    await load(lora_path="/adapters/late")
    assert await roots("router") == {"listed": "/adapters/listed", "late": "/adapters/late"}
    assert await roots("router-1") == {"listed": "/adapters/listed", "late": "late"}
    await load()
    await load(lora_name="listed", lora_path="/adapters/new")
    assert await roots("router") == {"listed": "/adapters/new", "late": "late"}
    assert await roots("router-1") == {"listed": "listed", "late": "late"}
    await load(lora_path="/adapters/late")
    async with Client(cluster.processes["router-1"].grpc) as other:
        await other.unload_adapter("late")
        await other.load_adapter("late", 8)
    assert (await roots("router"))["late"] == "late"


async def test_two_schedulers_agree_whichever_was_away(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs")
    await cluster.add("scheduler-1", "scheduler")
    await cluster.add("shard-1-worker", "worker", [f"worker.scheduler={cluster.processes['scheduler-1'].grpc}"])
    await cluster.serving("shard-1-worker")
    address = await _add_router(cluster, "scheduler", "scheduler-1")

    async def connected(number: int) -> None:
        async def so() -> bool:
            return await scrape(cluster, "router-1", "lorrery_router_shard_connected") == number

        await wait_until(so)

    async with Client(address) as client:
        await connected(2)
        await client.load_adapter("x", 8)
        for away in ("scheduler", "scheduler-1"):
            cluster.kill(away)
            await cluster.ended(away)
            await connected(1)
            await client.unload_adapter("x")
            await client.load_adapter("x", 16 if away == "scheduler" else 32)
            await cluster.restart(away)
            await connected(2)
        for name in ("scheduler", "scheduler-1"):
            async with grpc.aio.insecure_channel(cluster.processes[name].grpc) as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                status = await stub.GetStatus(scheduler_pb2.GetStatusRequest(), timeout=20)
                assert {adapter.adapter_id: adapter.rank for adapter in status.adapters}["x"] == 32


async def test_with_a_file_adapters_survive_that_everything_restarts(start_cluster: StartCluster, tmp_path: Path):
    cluster = await start_cluster("scheduler.policy=fcfs", f"scheduler.adapters_file={tmp_path / 'adapters'}")
    async with client_of(cluster) as client:
        await client.load_adapter("x", 32)
        await client.unload_adapter("big")
    for name in ("router", "scheduler"):
        cluster.kill(name)
    for name in ("scheduler", "router"):
        await cluster.restart(name)
    async with client_of(cluster) as client:
        await _knows(client, "x", 32)
        assert "big" not in await client.adapters()
        (await _one_token(client, "x")).check(cluster.settings)


async def test_loads_overlap_and_others_pass_who_waits_for_one_within_the_bound(start_cluster: StartCluster):
    # A load takes minutes here, so nobody who waits for one is served in this test.
    cluster = await start_cluster(
        "scheduler.policy=fcfs", "adapters.disk_gb_per_second=0.0002", "adapters.max_overtakes=5"
    )
    async with client_of(cluster) as client:
        cold = [client.start(Ask(seed, 8, 4, f"lora-{seed}")) for seed in range(4)]

        async def all_under_way() -> bool:
            return await scrape(cluster, "scheduler", "lorrery_scheduler_worker_loading_adapters") == 4

        await wait_until(all_under_way)
        for seed in range(5):
            (await client.start(Ask(seed, 8, 4))).check(cluster.settings)
        held_up = client.start(Ask(9, 8, 4))

        async def they_wait() -> bool:
            return await scrape(cluster, "scheduler", "lorrery_scheduler_waiting_requests") == 5

        await wait_until(they_wait)
        assert not any(stream.over for stream in (*cold, held_up))
        for stream in cold:
            stream.cancel()
        (await held_up).check(cluster.settings)
    await nothing_held(cluster)


async def test_a_load_over_http_returns_when_every_worker_has_the_adapter_on_its_gpu(start_cluster: StartCluster):
    cluster = await start_cluster("adapters.max_loras=1", "scheduler.policy=fcfs")
    await cluster.add("scheduler-1", "scheduler")
    await cluster.add("shard-1-worker", "worker", [f"worker.scheduler={cluster.processes['scheduler-1'].grpc}"])
    await cluster.serving("shard-1-worker")
    await _add_router(cluster, "scheduler", "scheduler-1")
    async with Client(cluster.processes["router-1"].grpc) as client:

        async def attached() -> bool:
            return sum(len(shard.workers) for shard in await client.shards()) == 2

        await wait_until(attached, what="both workers are attached")
        for name, replaced in (("first", set()), ("second", {"first"})):
            await client.load_adapter(name, 16)
            assert [await _resident(cluster, shard) for shard in ("scheduler", "scheduler-1")] == [[name]] * 2
            gone = [
                await scrape(cluster, shard, "lorrery_scheduler_adapter_evictions_total", level="gpu")
                for shard in ("scheduler", "scheduler-1")
            ]
            assert gone == [len(replaced)] * 2
        (await _one_token(client, "second")).check(cluster.settings)
        for shard in ("scheduler", "scheduler-1"):
            assert await scrape(cluster, shard, "lorrery_scheduler_adapter_loads_total", outcome="ok", tier="disk") == 2
            assert await scrape(cluster, shard, "lorrery_scheduler_adapter_loads_total", outcome="ok", tier="host") == 0


async def test_with_every_place_in_use_a_load_ends_in_host_memory(start_cluster: StartCluster):
    cluster = await start_cluster("adapters.max_loras=1", "scheduler.policy=fcfs")
    async with client_of(cluster) as client:
        running = client.start(Ask(1, 8, ENDLESS, "lora-0"))
        await running.at(1)
        await client.load_adapter("new", 16)
        assert (
            await scrape(cluster, "scheduler", "lorrery_scheduler_adapter_loads_total", outcome="ok", tier="disk") == 2
        )
        waiting = client.start(Ask(2, 8, 1, "new"))
        running.cancel()
        (await waiting).check(cluster.settings)
        assert (
            await scrape(cluster, "scheduler", "lorrery_scheduler_adapter_loads_total", outcome="ok", tier="host") == 1
        )
    await nothing_held(cluster)


async def test_a_load_that_one_shard_cannot_do_is_undone_at_the_others(start_cluster: StartCluster):
    cluster = await start_cluster("scheduler.policy=fcfs")
    await cluster.add("scheduler-1", "scheduler", ["faults=['adapter_load_failure']"])
    await cluster.add("shard-1-worker", "worker", [f"worker.scheduler={cluster.processes['scheduler-1'].grpc}"])
    await cluster.serving("shard-1-worker")
    await _add_router(cluster, "scheduler", "scheduler-1")
    async with Client(cluster.processes["router-1"].grpc) as client:

        async def attached() -> bool:
            return sum(len(shard.workers) for shard in await client.shards()) == 2

        await wait_until(attached, what="both workers are attached")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.load_adapter("new", 16)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "could not be loaded on worker" in (error.value.details() or "")
        assert "new" not in await client.adapters()


async def test_an_unloaded_adapter_stays_in_memory_until_its_place_is_needed(
    start_cluster: StartCluster, tmp_path: Path
):
    keep = "adapters.keep_unloaded=true"
    cluster = await start_cluster(keep, "adapters.max_loras=1", "scheduler.policy=fcfs")
    async with client_of(cluster) as client:
        for name in "xy":
            body = {"name": name, "src": write_adapter(tmp_path / name)}
            answer = await exchange(cluster, "POST", "/adapters", body)
            assert (status_of(answer), answer.partition(b"\r\n\r\n")[2]) == (200, f"Adapter {name} registered".encode())
            assert await _resident(cluster, "scheduler") == [name]
            running = client.start(Ask(1, 8, LONG, name))
            await running.at(1)
            assert status_of(await exchange(cluster, "DELETE", f"/adapters/{name}")) == 200
            assert status_of(await exchange(cluster, "DELETE", f"/adapters/{name}")) == 404
            assert (await client.failure(Ask(2, 8, 1, name)))[0] is grpc.StatusCode.NOT_FOUND
            (await running).check(cluster.settings)
            assert await _resident(cluster, "scheduler") == [name]
    await nothing_held(cluster)


async def test_loads_and_unloads_are_answered_as_by_vllm(start_cluster: StartCluster, tmp_path: Path):
    cluster = await start_cluster("scheduler.policy=fcfs", "faults=['adapter_load_failure']")
    folder = write_adapter(tmp_path)
    failed = "could not be loaded on worker worker-0', please check the stack trace above for the root cause"
    for method, path, body, status, kind, message in (
        ("POST", "/v1/load_lora_adapter", {"lora_name": "x"}, 400, "Bad Request", "lora_path: Field required"),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": ""}, 400, "InvalidUserInput", "be provided."),
        ("POST", "/adapters", {"name": "lora-0", "src": folder}, 400, "InvalidUserInput", "'load_inplace' to True."),
        ("POST", "/adapters", {"name": "Llama-3-8B", "src": folder}, 400, "InvalidUserInput", "a served base model."),
        ("POST", "/adapters", {"name": "x", "src": folder}, 500, "InternalServerError", failed),
        ("DELETE", "/adapters/x", None, 404, "NotFoundError", "The lora adapter 'x' cannot be found."),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"}, 404, "NotFoundError", "'x' cannot be found."),
        ("POST", "/v1/unload_lora_adapter", {}, 400, "Bad Request", "lora_name: Field required"),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": ""}, 400, "InvalidUserInput", "to unload a LoRA adapter."),
    ):
        answer = await exchange(cluster, method, path, body)
        error = json_of(answer)["error"]
        assert (status_of(answer), error["code"], error["type"]) == (status, status, kind), error
        assert error["message"].endswith(message)
