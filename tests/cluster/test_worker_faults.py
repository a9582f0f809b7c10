"""Faults of workers and of their loads, live: what they do to streams, and that a simulation says the same."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

import lorrery
from lorrery.service.local.cluster import LocalCluster
from lorrery.simulator.replay.journal import read_journal
from lorrery.simulator.replay.parts import parts_of
from lorrery.simulator.replay.replay import replay
from lorrery.v1 import router_pb2
from tests.cluster.client import TIMEOUT_SECONDS, Ask, Client, client_of, error_info
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import metric, running_cluster, wait_until

pytestmark = pytest.mark.cluster

PATIENCE = "scheduler.worker_timeout_seconds=4"
"""Where a worker must be given up: soon, but not when it merely waits for a core."""


def faults(*rules: str) -> str:
    return f"faults={list(rules)}".replace("'", '"')


async def test_the_first_loads_of_an_adapter_fail_or_are_slow_as_simulated(tmp_path: Path) -> None:
    rules = ("adapter_load_failure,adapter=lora-0,first=4", "slow_adapter_load,adapter=lora-1,factor=100,first=1")
    adapters = ["lora-0", "lora-0", "lora-1", "lora-2"]
    async with running_cluster(tmp_path, faults(*rules)) as cluster, client_of(cluster) as client:
        live: list[str] = []
        seconds: list[float] = []
        for seed, adapter_id in enumerate(adapters):
            began = time.monotonic()
            stream = await client.start(Ask(seed, max_new_tokens=4, adapter_id=adapter_id))
            seconds.append(time.monotonic() - began)
            live.append("OK" if stream.error is None else stream.error.code().name)
        await nothing_held(cluster)
        address = cluster.metrics_address("scheduler")
        happened = {
            kind: metric(address, "lorrery_scheduler_faults_total", kind=kind)
            for kind in ("adapter_load_failure", "slow_adapter_load")
        }
    assert happened == {"adapter_load_failure": 4, "slow_adapter_load": 1}
    requests = lorrery.Requests(np.arange(4) * 60.0, [8] * 4, [4] * 4, adapters)
    simulated = lorrery.simulate(cluster.settings, requests, workers=1).columns
    assert live == simulated.status.tolist() == ["UNAVAILABLE", "OK", "OK", "OK"]
    e2e = (simulated.end_seconds - requests.at_seconds).tolist()
    assert e2e[2] > 10 * e2e[3]  # a load that takes so long leaves its mark
    assert all(took >= modelled for took, modelled in zip(seconds, e2e, strict=True))


async def test_a_worker_that_freezes_for_a_moment_keeps_its_streams(tmp_path: Path) -> None:
    rules = ("freeze_worker,worker=worker-0,at=5,for=0.8",)  # so late that the stream has begun
    async with running_cluster(tmp_path, faults(*rules)) as cluster, client_of(cluster) as client:
        ask = Ask(1, max_new_tokens=1200)
        (await client.start(ask)).check(cluster.settings)
        assert metric(cluster.metrics_address("worker-0"), "lorrery_worker_faults_total", kind="freeze_worker") == 1
        assert metric(cluster.metrics_address("worker-0"), "lorrery_worker_gaps_total") >= 1
        assert metric(cluster.metrics_address("scheduler"), "lorrery_scheduler_workers_lost_total") == 0


async def test_a_worker_that_stays_frozen_is_lost_though_it_beats_and_another_goes_on_with_its_streams(
    tmp_path: Path,
) -> None:
    rules = ("freeze_worker,worker=worker-0,at=1",)
    async with (
        running_cluster(tmp_path, faults(*rules), PATIENCE, num_workers=2) as cluster,
        client_of(cluster) as client,
    ):
        asks = [Ask(seed, max_new_tokens=400) for seed in range(6)]
        for stream in await asyncio.gather(*(client.start(ask) for ask in asks)):
            stream.check(cluster.settings)
        address = cluster.metrics_address("scheduler")
        assert metric(address, "lorrery_scheduler_workers_given_up_total", reason="stalled") == 1
        assert metric(address, "lorrery_scheduler_workers") == 1
        (await client.start(Ask(9))).check(cluster.settings)
    requests = lorrery.Requests([0.0] * 6, [8] * 6, [400] * 6)
    simulated = lorrery.simulate(cluster.settings, requests, workers=2).columns
    assert simulated.status.tolist() == ["OK"] * 6
    assert set(simulated.worker_id.tolist()) == {"worker-1"}
    assert simulated.num_requeues.max() == 1


async def test_a_worker_that_was_lost_frozen_comes_back_when_that_is_over(tmp_path: Path) -> None:
    rules = ("freeze_worker,worker=worker-0,at=0.5,for=15",)
    async with (
        running_cluster(tmp_path, faults(*rules), PATIENCE, num_workers=2) as cluster,
        client_of(cluster) as client,
    ):
        streams = [asyncio.ensure_future(client.start(Ask(seed, max_new_tokens=300))) for seed in range(4)]
        address = cluster.metrics_address("scheduler")
        given_up = "lorrery_scheduler_workers_given_up_total"
        await wait_until(lambda: metric(address, given_up, reason="stalled") == 1)
        await wait_until(lambda: metric(address, "lorrery_scheduler_workers") == 2)
        for stream in await asyncio.gather(*streams):
            stream.check(cluster.settings)
        assert metric(address, "lorrery_scheduler_workers_given_up_total", reason="stalled") == 1


@contextlib.asynccontextmanager
async def operated(folder: Path) -> AsyncIterator[tuple[LocalCluster, Client]]:
    """A cluster of two workers whose scheduler's journal replays exactly, whatever an operator has done to it."""
    journal = folder / "journal.jsonl"
    async with (
        running_cluster(folder, f"scheduler.journal='{journal}'", num_workers=2) as cluster,
        client_of(cluster) as client,
    ):
        yield cluster, client
        await nothing_held(cluster)
    result = replay(read_journal(journal), parts_of(read_journal(journal), journal))
    assert result.differences == []
    assert result.num_tokens > 0


async def set_faults(client: Client, *rules: str) -> None:
    await client.stub.SetFaults(router_pb2.SetFaultsRequest(rules=rules), timeout=TIMEOUT_SECONDS)


async def listed(client: Client) -> dict[str, int]:
    answer = await client.stub.ListFaults(router_pb2.ListFaultsRequest(), timeout=TIMEOUT_SECONDS)
    return {fault.rule: fault.num_requests for fault in answer.faults}


async def test_an_operator_loses_a_worker_which_comes_back_when_that_is_over(tmp_path: Path) -> None:
    async with operated(tmp_path) as (cluster, client):
        streams = [client.start(Ask(seed, max_new_tokens=300)) for seed in range(4)]
        for stream in streams:
            await stream.at(20)
        rule = "worker_loss,worker=worker-0,for=1.5"
        await set_faults(client, rule)
        address = cluster.metrics_address("scheduler")
        given_up = "lorrery_scheduler_workers_given_up_total"
        await wait_until(lambda: metric(address, given_up, reason="fault") == 1)
        for stream in streams:
            (await stream).check(cluster.settings)
        await wait_until(lambda: metric(address, "lorrery_scheduler_workers") == 2)
        assert metric(address, "lorrery_scheduler_workers_given_up_total", reason="fault") == 1
        assert metric(address, "lorrery_scheduler_faults_total", kind="worker_loss") == 1
        assert await listed(client) == {rule: 1}
        assert cluster.processes["worker-0"].exit_code is None


async def test_an_operator_slows_and_freezes_workers_and_takes_it_back(tmp_path: Path) -> None:
    async with operated(tmp_path) as (cluster, client):
        streams = [client.start(Ask(seed, max_new_tokens=1000)) for seed in range(4)]
        for stream in streams:
            await stream.at(20)
        rules = ("slow_worker,worker=worker-0,factor=3", "freeze_worker,worker=worker-1")
        await set_faults(client, *rules)
        frozen, slow = cluster.metrics_address("worker-1"), cluster.metrics_address("worker-0")
        await wait_until(lambda: metric(frozen, "lorrery_worker_faults_total", kind="freeze_worker") == 1)
        await wait_until(lambda: metric(slow, "lorrery_worker_faults_total", kind="slow_worker") >= 5)
        assert await listed(client) == dict.fromkeys(rules, 1)
        await set_faults(client)
        for stream in streams:
            (await stream).check(cluster.settings)
        assert metric(cluster.metrics_address("scheduler"), "lorrery_scheduler_workers_lost_total") == 0
        assert await listed(client) == {}


async def test_a_freeze_by_an_operator_is_over_when_its_worker_attaches_again_as_simulated(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, PATIENCE) as cluster, client_of(cluster) as client:
        rule = "freeze_worker,worker=worker-0,at=0.3,for=12"
        await set_faults(client, rule)
        stream = await client.start(Ask(1, max_new_tokens=200))
        assert stream.check(cluster.settings).num_requeues == 1
        assert await listed(client) == {rule: 2}  # the worker froze, and was given up for it
    requests = lorrery.Requests([0.0], [8], [200])
    simulated = lorrery.simulate(cluster.settings, requests, workers=1, faults=[rule]).columns
    assert (simulated.status.tolist(), simulated.num_requeues.tolist()) == (["OK"], [1])


async def test_an_operator_lets_loads_fail_for_workers_that_are_there_and_that_come(tmp_path: Path) -> None:
    async with operated(tmp_path) as (cluster, client):
        rules = ("adapter_load_failure,adapter=lora-0", "slow_worker,worker=worker-0,factor=2", "refuse,tenant=acme")
        await set_faults(client, *rules)
        error = await client.error(Ask(1, adapter_id="lora-0"))
        assert (error.code(), error_info(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "ADAPTER_LOAD")
        cluster.kill("worker-0")
        await cluster.restart("worker-0")
        cluster.kill("worker-1")
        asks = [Ask(seed, max_new_tokens=100, adapter_id="lora-1") for seed in range(4)]
        for stream in await asyncio.gather(*(client.start(ask) for ask in asks)):
            stream.check(cluster.settings)
        assert metric(cluster.metrics_address("worker-0"), "lorrery_worker_faults_total", kind="slow_worker") > 0
        found = await listed(client)
        assert list(found) == ["refuse,tenant=acme", *rules[:2]]
        assert found[rules[0]] == 3
        await cluster.restart("worker-1")
        await set_faults(client)
        (await client.start(Ask(1, adapter_id="lora-0"))).check(cluster.settings)
