"""Priorities of requests, in real processes: every door passes them on, and one seat goes to the lowest."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import grpc.aio
import pytest

from lorrery.vllm import inference_pb2_grpc
from tests.cluster.client import TIMEOUT_SECONDS, Ask, client_of
from tests.cluster.engines import native
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster, wait_until
from tests.cluster.http_client import PROMPT, exchange, status_of
from tests.cluster.test_journal import replayed

pytestmark = pytest.mark.cluster

SETTINGS = ("scheduler.policy=priority", "scheduler.max_num_seqs=1", "router.vllm_grpc=127.0.0.1:0")


async def test_one_seat_goes_to_the_lowest_priority_whatever_the_door_and_the_journal_replays(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    async with (
        running_cluster(tmp_path, *SETTINGS, f"scheduler.journal={path}") as cluster,
        client_of(cluster) as client,
        grpc.aio.insecure_channel(cluster.engine_addresses["vllm_grpc"]) as channel,
    ):
        body, waiting, ended = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}, list[asyncio.Task[None]](), []

        async def wait_for_seat(name: str, call: Awaitable[object]) -> None:
            async def ends() -> None:
                answer = await call
                assert not isinstance(answer, bytes) or status_of(answer) == 200, answer
                ended.append(name)

            async def waits() -> bool:
                waits_now = await scrape(cluster, "scheduler", "lorrery_scheduler_waiting_requests")
                return waits_now == len(waiting)

            waiting.append(asyncio.create_task(ends()))
            await wait_until(waits, what=f"{name} waits")

        running = client.start(Ask(seed=1, max_new_tokens=2000))
        await running.at(1)
        await wait_for_seat("5", exchange(cluster, "POST", "/v1/completions", {**body, "priority": 5}))
        in_header = {**body, "priority": 9}, "x-vllm-priority: 3"
        await wait_for_seat("3 in the header", exchange(cluster, "POST", "/v1/completions", *in_header))
        await wait_for_seat("none", exchange(cluster, "POST", "/v1/completions", body, "x-vllm-priority: soon"))
        await wait_for_seat("5 again", client.start(Ask(seed=2, max_new_tokens=4, priority=5)))
        urgent = native(Ask(seed=3, max_new_tokens=4, priority=-1))
        generate = inference_pb2_grpc.InferenceStub(channel).Generate
        await wait_for_seat("-1", generate(urgent, timeout=TIMEOUT_SECONDS))
        running.cancel()
        await asyncio.gather(*waiting)
        assert ended == ["-1", "none", "3 in the header", "5", "5 again"]
        await nothing_held(cluster)
    journal, result = replayed(path)
    assert result.differences == []
    assert journal.complete
    priorities = [line.content.get("priority") for line in journal.inputs if line.type == "request"]
    assert priorities == [None, 5, 3, None, 5, -1]
