"""What a stop string, a client that leaves, a deadline and a preemption do to each series, on a live worker.

docs/gateways.md has a column of it, which the last tests read.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Stream, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import StartCluster, wait_until
from tests.cluster.http_client import PROMPT, openai_client
from tests.cluster.test_engine_metrics import scraped, value

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).parents[2] / "docs" / "gateways.md"
SETTINGS = ("scheduler.policy=fcfs", "scheduler.prefix_cache.kind=blocks", "metrics.sglang=true")
SMALL_POOL = (
    *("scheduler.batching=vllm", "scheduler.memory=on_demand", "scheduler.block_size=4", "scheduler.max_num_seqs=8"),
    *("scheduler.max_num_batched_tokens=512", "scheduler.max_req_total_len=128", "scheduler.max_req_input_len=60"),
)
Counted = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def counted(families: dict[str, Metric]) -> Counted:
    """Return counters, and the number and (of other than seconds) the sum of histograms; no gauges."""
    found = {}
    for family in families.values():
        for sample in family.samples:
            if family.type == "gauge" or sample.name.endswith(("_bucket", "_created")):
                continue
            if sample.name.endswith("seconds_sum"):
                continue
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def changed(before: Counted, after: Counted) -> set[str]:
    """Return the names of the series that differ."""
    names = {name for (name, labels), number in after.items() if number != before.get((name, labels), 0)}
    return {re.sub(r"_(sum|count)$", "", name) for name in names}


async def of_worker(cluster: LocalCluster) -> dict[str, Metric]:
    return await asyncio.to_thread(scraped, cluster.metrics_address("worker-0"))


async def at_rest(cluster: LocalCluster) -> dict[str, Metric]:
    """Return the worker's series once its scheduler's last figures are there."""
    await nothing_held(cluster)
    last: list[Counted] = []

    async def settled() -> bool:
        last.append(counted(await of_worker(cluster)))
        await asyncio.sleep(0.6)
        return len(last) > 2 and last[-1] == last[-2] == last[-3]

    await wait_until(settled, what="the worker's last figures")
    return await of_worker(cluster)


async def test_outputs_that_the_router_ends_count_as_stops_in_every_series(start_cluster: StartCluster):
    cluster = await start_cluster(*SETTINGS)
    async with openai_client(cluster) as client:
        answer = await client.completions.create(
            model="", prompt=PROMPT, max_tokens=100, n=5, stop=["e"], seed=3, extra_body={"ignore_eos": True}
        )
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 5
    assert answer.usage is not None
    kept = answer.usage.completion_tokens
    worker = await at_rest(cluster)
    edge = await asyncio.to_thread(scraped, cluster.processes["router"].http)
    for found in (worker, edge):
        success = {reason: value(found, "vllm:request_success_total", finished_reason=reason) for reason in REASONS}
        assert success == {"stop": 5, "length": 0, "abort": 0, "error": 0, "repetition": 0}
        for name in ("request_prompt_tokens", "request_generation_tokens", "e2e_request_latency_seconds"):
            assert value(found, f"vllm:{name}_count") == 5, name
        assert value(found, "vllm:request_prompt_tokens_sum") == 5 * len(PROMPT)
        assert value(found, "vllm:request_generation_tokens_sum") == kept
        assert value(found, "vllm:generation_tokens_total") == kept
        assert value(found, "vllm:request_params_n_count") == 1
        assert value(found, "vllm:request_params_n_sum") == 5
        assert value(found, "vllm:request_max_num_generation_tokens_count") == 1
        assert value(found, "sglang:num_requests_total") == 5
        assert value(found, "sglang:num_aborted_requests_total") == 0
        by_source = [value(found, "vllm:prompt_tokens_by_source_total", source=source) for source in SOURCES]
        assert sum(by_source) == value(found, "vllm:prompt_tokens_total") == 5 * len(PROMPT)
    requests = "lorrery_scheduler_requests_total"
    assert await scrape(cluster, "scheduler", requests, outcome="stop") == 5
    assert await scrape(cluster, "scheduler", requests, outcome="cancelled") == 0
    cut = await scrape(cluster, "scheduler", "lorrery_scheduler_cancels_total", cause="stop_text")
    assert 0 < cut <= 5


REASONS = ("stop", "length", "abort", "error", "repetition")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@pytest.mark.parametrize("score", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
async def test_a_prompt_whose_positions_all_count_is_not_looked_up(start_cluster: StartCluster, score: dict[str, Any]):
    cluster = await start_cluster(*SETTINGS)
    prompt = PROMPT * 18
    async with openai_client(cluster) as client:

        async def cached(**more: Any) -> int:
            answer = await client.completions.create(model="", prompt=prompt, max_tokens=2, **more)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        assert await cached() == 0
        assert await cached() == 128
        before = await at_rest(cluster)
        assert await cached(extra_body=score) == 0
        after = await at_rest(cluster)
        assert await cached() == 128
    for name in ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_cached"):
        assert value(after, f"vllm:{name}_total") == value(before, f"vllm:{name}_total"), name
    computed = [value(found, "vllm:prompt_tokens_by_source_total", source="local_compute") for found in (before, after)]
    assert computed[1] - computed[0] == len(prompt)


# --- the column of the page ------------------------------------------------------------------------------------------


def column() -> dict[str, set[str]]:
    """Return what the page says of each series: which of the four events it counts."""
    rows = re.findall(r"^\| (`.*?) \|.*\| ([a-z, -]*) \|$", PAGE.read_text(), re.MULTILINE)
    found: dict[str, set[str]] = {}
    for names, events in rows:
        for name in re.findall(r"`([a-z_0-9]+)(?:\{[^`]*\})?`", names):
            found[name] = set() if events == "-" else set(events.split(", "))
    return found


def said(event: str) -> set[str]:
    return {f"vllm:{name}" for name, events in column().items() if event in events}


async def _stopped(cluster: LocalCluster) -> None:
    async with openai_client(cluster) as client:
        await client.completions.create(
            model="", prompt=PROMPT * 4, max_tokens=100, stop=["e"], seed=3, extra_body={"ignore_eos": True}
        )


async def _left(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        stream = client.start(Ask(seed=1, prompt_tokens=32, max_new_tokens=3000))
        await stream.at(3)
        stream.cancel()
        await _end(stream)


async def _too_late(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        stream = client.start(Ask(seed=2, prompt_tokens=32, max_new_tokens=3000), timeout=1.0)
        await _end(stream)
        assert len(stream.token_ids) > 2


async def _end(stream: Stream) -> None:
    await asyncio.gather(stream, return_exceptions=True)


@pytest.mark.parametrize(("event", "happen"), [("stop", _stopped), ("abort", _left), ("deadline", _too_late)])
async def test_the_page_says_which_series_count_an_end(
    start_cluster: StartCluster, event: str, happen: Callable[[LocalCluster], Awaitable[None]]
):
    cluster = await start_cluster("scheduler.policy=fcfs", "scheduler.prefix_cache.kind=blocks")
    async with client_of(cluster) as client:
        await client.start(Ask(seed=9, prompt_tokens=48, max_new_tokens=2))  # the next ones find its blocks
    before = counted(await at_rest(cluster))
    await happen(cluster)
    assert changed(before, counted(await at_rest(cluster))) == said(event)


async def test_the_page_says_which_series_count_a_preemption(start_cluster: StartCluster):
    found = []
    for pool in (2000, 160):
        cluster = await start_cluster(
            *("scheduler.policy=fcfs", "scheduler.prefix_cache.kind=blocks"),
            *SMALL_POOL,
            f"scheduler.max_total_token_num={pool}",
        )
        async with client_of(cluster) as client:
            asks = [Ask(seed=seed, prompt_tokens=3, max_new_tokens=60) for seed in range(4)]
            await asyncio.gather(*[client.start(ask) for ask in asks])
        families = await at_rest(cluster)
        found.append(counted(families))
        preemptions = value(families, "vllm:num_preemptions_total")
        assert (preemptions > 0) == (pool == 160)
    # Decode steps of fewer sequences are more steps: how many there are says nothing.
    assert changed(*found) == said("preemption")
