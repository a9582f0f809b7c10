"""Paged memory and the block cache through the scheduler's streams: preemption, usage and metrics."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lorrery.scheduler.cluster import Cluster
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import load
from tests.scheduler.harness import OVERRIDES, Harness, Worker, tokens_of

PAGED = (
    *OVERRIDES,
    "scheduler.memory='paged'",
    "scheduler.block_size=4",
    "scheduler.watermark=0.0",
    "scheduler.prefix_cache.kind='blocks'",
)


@pytest.fixture
async def scheduler() -> AsyncIterator[Harness]:
    async with Harness(load(None, PAGED)) as harness:
        yield harness


async def serve(worker: Worker) -> None:
    """Run every plan to its end."""
    while True:
        plan = await worker.plan()
        for step in range(plan.max_steps):
            lengths = list(worker.lengths.values())
            ends = any(position + 1 == length for position, length in lengths)
            last = bool(plan.prefill_handles_u32) or ends or step + 1 == plan.max_steps
            await worker.step(plan, hand_back=last)
            if last:
                break


async def test_a_second_request_finds_prompt_and_output_of_the_first(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(pool=400), await scheduler.route()
    running = asyncio.create_task(serve(worker))
    try:
        await router.submit(1, prompt=10, max_new=8, adapter="a")
        _, finished = await tokens_of(router, 1)
        assert finished.usage.cached_tokens == 0
        await router.submit(2, prompt=10, max_new=2, adapter="a")
        _, finished = await tokens_of(router, 2)
        assert finished.usage.cached_tokens == 8
        await router.submit(3, prompt=10, max_new=2)
        _, finished = await tokens_of(router, 3)
        assert finished.usage.cached_tokens == 0
        # What the first produced, with the prompt before it: as a client's next turn would send it.
        tokens = np.array([*range(10), *(100 + position for position in range(8))], "<u4")
        live = next(iter(scheduler.service._cluster.workers.values()))
        assert live.replica.prefix_cache is not None
        assert live.replica.prefix_cache.match(tokens.tolist(), "a") == 16
    finally:
        running.cancel()
    assert scheduler.value("prefix_cache_queries_total") == 30
    assert scheduler.value("prefix_cache_hits_total") == 8
    blocks = {
        state: scheduler.value("worker_kv_blocks", worker="w", state=state) for state in ("used", "cached", "free")
    }
    assert blocks["used"] == 0
    assert blocks["cached"] == 4 + 2
    assert sum(blocks.values()) == 100


async def test_a_preempted_request_goes_on_where_it_was(scheduler: Harness) -> None:
    worker, router = await scheduler.attach(pool=32), await scheduler.route()
    await router.submit(1, prompt=16, max_new=12)
    await router.submit(2, prompt=16, max_new=12)
    await router.submit(3, adapter="unknown")
    assert (await router.read()).refused.handle == 3  # so both have arrived,
    worker.clock_ps = 100 * 10**12  # and both before the first step ends
    running = asyncio.create_task(serve(worker))
    tokens: dict[int, list[int]] = {1: [], 2: []}
    requeues: dict[int, int] = {}
    try:
        while len(requeues) < 2:
            message = (await router.read()).tokens
            handles = np.frombuffer(message.handles_u32, "<u4").tolist()
            for handle, token in zip(handles, np.frombuffer(message.token_ids_u32, "<u4").tolist(), strict=True):
                tokens[handle].append(token)
            requeues |= {finished.handle: finished.usage.num_requeues for finished in message.finished}
    finally:
        running.cancel()
    assert tokens == {1: [100 + position for position in range(12)], 2: [200 + position for position in range(12)]}
    assert requeues == {1: 0, 2: 1}
    assert scheduler.value("preemptions_total") == 1
    assert scheduler.value("prefix_cache_evictions_total") > 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["scheduler.memory='paged'", "scheduler.batching='static'"], "nobody leaves a batch"),
        (["scheduler.memory='paged'", "scheduler.strict=true"], "S-LoRA.s queues have memory"),
        (["scheduler.memory='paged'", "scheduler.policy='fcfs'", "scheduler.max_num_batched_tokens=512"], "preempted"),
        (["scheduler.watermark=1.0"], "watermark"),
        (["scheduler.block_size=0"], "block_size"),
    ],
)
def test_senseless_combinations_are_refused_with_the_reason(overrides: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load(None, overrides)


def test_chunked_prefill_takes_preempted_sequences_in_pieces() -> None:
    settings = load(
        None,
        [
            "scheduler.memory='paged'",
            "scheduler.policy='fcfs'",
            "scheduler.batching='chunked'",
            "scheduler.max_num_batched_tokens=512",
        ],
    )
    assert settings.scheduler.max_num_batched_tokens == 512


@pytest.mark.parametrize(
    ("model", "rule", "slots"),
    [
        ("Llama-2-7B", "slora", 32),
        ("Llama-2-7B", "exact", 32),
        ("Llama-3-8B", "exact", 104),
        ("Qwen2.5-7B", "exact", 176),
    ],
)
async def test_slots_of_an_adapter_by_rule(model: str, rule: str, slots: int) -> None:
    cluster = Cluster(
        load(None, [f"model='{model}'", f"adapters.slots_rule='{rule}'", "adapters.registry=[{id='a', rank=8}]"]),
        CollectorRegistry(),
    )
    assert cluster.core.adapters["a"].slots == slots
    await cluster.adapters.load("b", 16)
    assert cluster.core.adapters["b"].slots == 2 * slots
