"""The thinnest path: one request through router, scheduler and one worker, and back."""

import asyncio
import random
from typing import Any

import pytest

from lorrery.router.logprobs import NEVER
from lorrery.tokenizer.base import EOS_ID
from lorrery.v1 import router_pb2, types_pb2
from tests.cluster.client import TIMEOUT_SECONDS, Ask, client_of, mixed_asks
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster
from tests.cluster.series import check_series

pytestmark = pytest.mark.cluster

FCFS = "scheduler.policy=fcfs"
ADAPTERS = ("", "lora-0", "lora-1", "lora-2", "lora-3", "big")


async def test_one_request_gets_every_token_in_order(start_cluster: StartCluster):
    cluster = await start_cluster(FCFS)
    async with client_of(cluster) as client:
        stream = await client.start(Ask(seed=7, prompt_tokens=20, max_new_tokens=30, adapter_id="lora-1"))
        usage = stream.check(cluster.settings)
        ((worker,),) = [shard.workers for shard in await client.shards()]
        assert usage.worker_id == worker.worker_id
        assert usage.cached_tokens == 0
        assert usage.num_requeues == 0
        assert 0 <= usage.queue_seconds < 60
        assert stream.finish is not None
        assert stream.finish.reason == types_pb2.FINISH_REASON_LENGTH

        by_eos = await client.start(Ask(seed=8, max_new_tokens=100, ignore_eos=False, true_output_tokens=12))
        usages = [usage, by_eos.check(cluster.settings)]
        assert by_eos.finish is not None
        assert by_eos.finish.reason == types_pb2.FINISH_REASON_EOS
        assert len(by_eos.token_ids) == 12
    await nothing_held(cluster)
    assert await scrape(cluster, "router", "lorrery_router_output_tokens_total") == 42
    assert await scrape(cluster, "scheduler", "lorrery_scheduler_output_tokens_total") == 42
    assert await scrape(cluster, "worker-0", "lorrery_worker_output_tokens_total") == 42
    assert await scrape(cluster, "router", "lorrery_router_requests_total", outcome="ok") == 2
    for adapter in ("lora-1", "base"):
        assert await scrape(cluster, "router", "lorrery_router_adapter_requests_total", adapter=adapter) == 1
    assert await scrape(cluster, "scheduler", "lorrery_scheduler_loads_by_adapter_total", adapter="lora-1") == 1
    for level in ("gpu", "host"):
        labels = {"worker": "worker-0", "adapter": "lora-1", "level": level}
        assert await scrape(cluster, "scheduler", "lorrery_scheduler_worker_adapter_resident", **labels) == 1
    for phase in ("queue", "adapter_load", "prefill", "decode"):
        seconds = await scrape(cluster, "scheduler", "lorrery_scheduler_request_phase_seconds_sum", phase=phase)
        assert seconds == pytest.approx(sum(getattr(usage, f"{phase}_seconds") for usage in usages)), phase
    assert await scrape(cluster, "worker-0", "lorrery_worker_info", worker="worker-0") == 1
    await check_series(cluster, unseen=frozenset({"lorrery_scheduler_worker_kv_blocks"}))  # there are none here


async def test_text_prompt_and_stop_string_travel_the_whole_way(start_cluster: StartCluster):
    cluster = await start_cluster(FCFS)
    async with client_of(cluster) as client:
        whole = await client.start(Ask(seed=11, max_new_tokens=40))
        words = whole.text.split()
        stop = f" {words[9]}"
        assert words.index(words[9]) == 9
        message = router_pb2.GenerateRequest(
            text="tell me about the weather",
            seed=11,
            sampling=types_pb2.SamplingParams(max_new_tokens=40, ignore_eos=True, stop_sequences=[stop]),
        )
        call = client.stub.Generate(message, timeout=TIMEOUT_SECONDS)
        try:
            messages = [message async for message in call]
        finally:
            call.cancel()
    text = "".join(message.text for message in messages)
    token_ids = [token_id for message in messages for token_id in message.token_ids]
    assert text == whole.text[: whole.text.index(stop)]
    assert token_ids == whole.token_ids[:10]
    assert messages[-1].finish.reason == types_pb2.FINISH_REASON_STOP
    assert messages[-1].finish.usage.completion_tokens == 10
    await nothing_held(cluster)


async def test_an_adapter_may_be_the_model_and_output_has_its_least_length(start_cluster: StartCluster):
    cluster = await start_cluster(FCFS)

    async def answer(**fields: Any) -> tuple[list[int], router_pb2.GenerateResponse]:
        message = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[9] * 20), seed=7, **fields)
        messages = [message async for message in client.stub.Generate(message, timeout=TIMEOUT_SECONDS)]
        assert [len(message.logprobs) for message in messages] == [
            len(message.token_ids) if "top_logprobs" in fields else 0 for message in messages
        ]
        return [token_id for message in messages for token_id in message.token_ids], messages[-1]

    async with client_of(cluster) as client:
        whole = await client.start(Ask(seed=7, max_new_tokens=60, adapter_id="lora-1"))
        stop = whole.text.split()[4]
        sampling = types_pb2.SamplingParams(max_new_tokens=60, min_new_tokens=30, stop_token_ids=[whole.token_ids[39]])
        token_ids, last = await answer(model="lora-1", sampling=sampling, true_output_tokens=50)
        assert token_ids == whole.token_ids[:40]
        assert last.finish.reason == types_pb2.FINISH_REASON_STOP
        sampling = types_pb2.SamplingParams(max_new_tokens=60, min_new_tokens=30, stop_sequences=[f" {stop}"])
        token_ids, last = await answer(model="lora-1", sampling=sampling, true_output_tokens=10)
        assert token_ids == [*whole.token_ids[:30], EOS_ID]
        assert last.finish.reason == types_pb2.FINISH_REASON_EOS
        _, last = await answer(fill_context=True, truncate_prompt_tokens=6, top_logprobs=2, true_output_tokens=40)
        assert last.finish.usage.prompt_tokens == 6
        assert last.finish.usage.completion_tokens == 40
        logprobs = last.logprobs[-1]
        assert (logprobs.logprob, list(logprobs.top_logprobs)) == (0.0, [0.0, NEVER])
    await nothing_held(cluster)


async def test_stop_string_that_only_the_text_shows_tells_the_whole_usage(start_cluster: StartCluster):
    cluster = await start_cluster(FCFS)
    stop = "fixed"  # not how the vocabulary spells the word behind a space, so the worker goes on
    whole_message, message = (
        router_pb2.GenerateRequest(
            text="hi",
            seed=7,
            sampling=types_pb2.SamplingParams(max_new_tokens=40, ignore_eos=True, stop_sequences=stop_sequences),
        )
        for stop_sequences in ([], [stop])
    )
    async with client_of(cluster) as client:
        # A step is running whenever the others arrive, so they wait for its end.
        before = client.start(Ask(seed=1, max_new_tokens=2000))
        await before.at(1)
        whole = [part async for part in client.stub.Generate(whole_message, timeout=TIMEOUT_SECONDS)]
        parts = [part async for part in client.stub.Generate(message, timeout=TIMEOUT_SECONDS)]
        ((worker,),) = [shard.workers for shard in await client.shards()]
        assert not before.over
        before.cancel()
    whole_text = "".join(part.text for part in whole)
    assert "".join(part.text for part in parts) == whole_text[: whole_text.index(stop)]
    finish = parts[-1].finish
    assert finish.reason == types_pb2.FINISH_REASON_STOP
    assert finish.usage.completion_tokens == sum(len(part.token_ids) for part in parts) < 40
    assert finish.usage.worker_id == worker.worker_id
    assert finish.usage.prompt_tokens == whole[-1].finish.usage.prompt_tokens
    assert 0 < finish.usage.queue_seconds < 60
    await nothing_held(cluster)


@pytest.mark.parametrize(
    "overrides",
    [
        ["scheduler.policy=fcfs", "scheduler.max_num_seqs=8"],
        ["scheduler.policy=req_queue", "scheduler.running_max_req_size=8"],
        ["scheduler.policy=req_queue", "scheduler.strict=true", "scheduler.prefetch=true"],
        ["scheduler.policy=req_queue", "worker.step_time=llm-mock", "time_scale=0.1"],
        ["scheduler.policy=vtc_fair", "scheduler.fair_weights=[1, 2, 0.5]"],
        ["scheduler.policy=abort", "scheduler.first_token_slo_seconds=60"],
        ["scheduler.policy=cluster", "scheduler.batch_num_adapters=2", "scheduler.prefetch=true"],
        ["scheduler.policy=cluster", "scheduler.batch_num_adapters=2", "scheduler.strict=true"],
        ["scheduler.policy=peft", "scheduler.batching=mixed"],
        ["scheduler.policy=pets", "scheduler.running_max_req_size=4"],
        [
            "scheduler.policy=fcfs",
            "scheduler.batching=llm_mock",
            "scheduler.memory=none",
            "scheduler.max_num_seqs=10",
            "worker.step_time=llm-mock",
            "time_scale=0.1",
        ],
    ],
    ids=lambda overrides: " ".join(override.partition("=")[2] for override in overrides),
)
async def test_every_policy_serves_a_mixed_crowd(start_cluster: StartCluster, overrides: list[str]):
    cluster = await start_cluster(*overrides, "scheduler.max_total_token_num=4200")
    asks = mixed_asks(24, random.Random(1), prompt=(1, 300), output=(1, 40), adapters=ADAPTERS)
    async with client_of(cluster) as client:
        streams = [client.start(ask) for ask in asks]
        await asyncio.gather(*streams)
        for stream in streams:
            stream.check(cluster.settings)
    await nothing_held(cluster)
