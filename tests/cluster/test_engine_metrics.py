"""Other engines' names, on each worker and on the HTTP edge of a running cluster.

`data/engine_series.json` lists the series of vLLM 0.32, llm-d-inference-sim and SGLang 0.5 that are shown, with their
types, labels and buckets (`lengths`: 1, 2, 5 and so on, up to the longest request); `le` is no label of theirs.
`record_series.py` records vLLM's anew.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric

from lorrery.service.local.cluster import LocalCluster
from lorrery.service.telemetry.engine_series import TOOL_PARSES, counts_up_to
from lorrery.v1 import types_pb2
from tests.cluster.client import Ask, Stream, client_of, mixed_asks
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import StartCluster, wait_until
from tests.cluster.http_client import PROMPT, openai_client
from tests.cluster.record_series import described, shown

pytestmark = pytest.mark.cluster

LISTED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "engine_series.json").read_text())
MAX_LEN = 4096
PICKERS = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:lora_requests_info",
    "vllm:cache_config_info",
    "vllm:lora_adapter_loaded",
    "vllm:num_gpu_loaded_lora_adapters",
    "vllm:max_gpu_lora_adapters",
    *("sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage", "sglang:page_size", "sglang:num_pages"),
)
"""What the gateway API's inference extension reads of a model server (its model server protocol)."""
SETTINGS = (
    "scheduler.policy=fcfs",
    "scheduler.prefix_cache.kind=blocks",
    "adapters.max_loras=2",
    "adapters.max_cpu_loras=3",
    "metrics.sglang=true",
)


def scraped(url: str) -> dict[str, Metric]:
    return {name: one for name, one in shown(f"http://{url}").items() if not name.startswith("http_")}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    ending = next((ending for ending in ("_sum", "_count") if name.endswith(ending)), "")
    family = families[name.removesuffix(ending)]
    found = [s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    assert found, f"{name} {labels}"
    return sum(found)


def labels_of(families: dict[str, Metric], name: str) -> list[dict[str, str]]:
    return [sample.labels for sample in families[name].samples]


async def all_of(cluster: LocalCluster, *workers: str) -> list[dict[str, Metric]]:
    return [await asyncio.to_thread(scraped, cluster.metrics_address(name)) for name in workers]


def total(scrapes: list[dict[str, Metric]], name: str, **labels: str) -> float:
    return sum(value(one, name, **labels) for one in scrapes)


async def test_workers_and_the_edge_show_what_happens_under_other_engines_names(start_cluster: StartCluster):
    cluster = await start_cluster(*SETTINGS, "time_scale=0.5", num_workers=2)
    workers = ("worker-0", "worker-1")
    edge = cluster.processes["router"].http
    rng = random.Random(5)

    assert not await asyncio.to_thread(scraped, cluster.metrics_address("router"))  # else what scrapes all counts twice
    async with client_of(cluster) as client:
        names = ("", "lora-0", "lora-1", "lora-2", "big")
        asks = mixed_asks(24, rng, prompt=(40, 300), output=(60, 150), adapters=names)
        streams: list[Stream] = [client.start(ask) for ask in asks]
        endless = client.start(Ask(seed=3, prompt_tokens=32, max_new_tokens=4000, adapter_id="lora-3"))
        await endless.at(2)
        await asyncio.gather(*streams)
        usages = [stream.check(cluster.settings) for stream in streams]

        async def busy() -> bool:
            found = await all_of(cluster, *workers)
            running = [name for one in found for name in labels_of(one, "vllm:lora_requests_info")]
            listed = any("lora-3" in labels["running_lora_adapters"].split(",") for labels in running)
            return listed and total(found, "vllm:num_requests_running") == 1

        await wait_until(busy, what="a worker that runs the endless request")
        assert value(await asyncio.to_thread(scraped, edge), "vllm:num_requests_running") >= 1
        endless.cancel()
        await asyncio.wait([asyncio.ensure_future(_end(endless))])
        again = [await client.start(asks[0]) for _ in range(4)]  # finds its prompt wherever it is sent to a second time
        left = client.start(replace(asks[0], max_new_tokens=3000))  # and so does one whose client leaves
        await left.at(2)
        left.cancel()
        await asyncio.wait([asyncio.ensure_future(_end(left))])
        usages += [stream.check(cluster.settings) for stream in again]
    await nothing_held(cluster)

    async def told() -> bool:
        found = await all_of(cluster, *workers)
        at_rest = total(found, "vllm:num_requests_running") == total(found, "vllm:num_requests_waiting") == 0
        return at_rest and total(found, "sglang:num_aborted_requests_total") == 2

    await wait_until(told, what="the workers to show that nothing runs")
    found = await all_of(cluster, *workers)
    at_edge = await asyncio.to_thread(scraped, edge)
    prompts, outputs = sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages)
    reasons = Counter(stream.finish.reason for stream in (*streams, *again) if stream.finish is not None)
    by_length = reasons[types_pb2.FINISH_REASON_LENGTH]
    assert total(found, "vllm:request_success_total", finished_reason="length") == by_length > 0
    assert total(found, "vllm:request_success_total", finished_reason="stop") == len(usages) - by_length > 0
    unfinished = 32 + asks[0].prompt_tokens
    assert total(found, "vllm:prompt_tokens_total") == prompts + unfinished
    assert total(found, "vllm:request_prompt_tokens_sum") == prompts
    assert total(found, "vllm:request_generation_tokens_sum") == outputs
    assert total(found, "vllm:generation_tokens_total") >= outputs + 4
    assert total(found, "vllm:request_success_total", finished_reason="abort") == 0  # as in vLLM
    assert total(found, "vllm:time_to_first_token_seconds_count") == len(usages) + 2
    cached = sum(usage.cached_tokens for usage in usages)
    assert cached > 0
    assert total(found, "vllm:prompt_tokens_cached_total") > cached
    for name in ("prompt_tokens_cached", "prefix_cache_queries", "prefix_cache_hits"):
        assert value(at_edge, f"vllm:{name}_total") == total(found, f"vllm:{name}_total")
    # Every token but a request's first has a gap; what the cancelled ones have beyond their two is not known here.
    assert total(found, "vllm:inter_token_latency_seconds_count") >= outputs - len(usages) + 2
    assert total(found, "vllm:kv_cache_usage_perc") == 0
    phases = [
        sum(usage.queue_seconds + usage.adapter_load_seconds for usage in usages),
        sum(usage.prefill_seconds for usage in usages),
        sum(usage.decode_seconds for usage in usages),
    ]
    for name, seconds in zip(("queue", "prefill", "decode"), phases, strict=True):
        assert total(found, f"vllm:request_{name}_time_seconds_sum") == pytest.approx(seconds)
        assert value(at_edge, f"vllm:request_{name}_time_seconds_sum") == pytest.approx(seconds)
    assert total(found, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(sum(phases))
    assert total(found, "vllm:num_gpu_loaded_lora_adapters") == 4
    loaded = [labels for one in found for labels in labels_of(one, "vllm:lora_adapter_loaded")]
    assert len([labels for labels in loaded if labels["level"] == "gpu"]) == 4
    assert total(found, "vllm:lora_adapter_load_seconds_count") >= 4
    assert value(found[0], "vllm:max_gpu_lora_adapters") == 2
    assert value(at_edge, "vllm:request_success_total", finished_reason="length") == by_length
    assert value(at_edge, "vllm:request_success_total", finished_reason="stop") == len(usages) - by_length
    assert value(at_edge, "vllm:request_success_total", finished_reason="abort") == 0
    assert value(at_edge, "sglang:num_aborted_requests_total") == 2
    assert value(at_edge, "vllm:generation_tokens_total") == total(found, "vllm:generation_tokens_total")
    assert value(at_edge, "vllm:prompt_tokens_total") == prompts + unfinished
    assert value(at_edge, "vllm:request_generation_tokens_sum") == outputs

    wanted = {
        name: {**one, "buckets": list(counts_up_to(MAX_LEN))} if one.get("buckets") == "lengths" else one
        for name, one in LISTED.items()
        if not name.startswith("http_")
    }
    for families in (*found, at_edge):
        parses = families.pop(TOOL_PARSES.name, None)
        assert (parses is not None) == (families is at_edge)
        assert {name: described(family) for name, family in families.items()} == wanted
        assert families.keys() >= set(PICKERS)
        assert {labels["model_name"] for labels in labels_of(families, "vllm:num_requests_running")} == {"Llama-3-8B"}
        assert {labels["engine"] for labels in labels_of(families, "vllm:num_requests_running")} == {"0"}

    before = value(found[0], "vllm:prompt_tokens_total")
    cluster.kill("scheduler")
    await wait_until(
        lambda: value(scraped(cluster.metrics_address("worker-0")), "vllm:num_gpu_loaded_lora_adapters") == 0,
        what="a worker that has noticed that its scheduler is gone",
    )
    alone = await asyncio.to_thread(scraped, cluster.metrics_address("worker-0"))
    assert value(alone, "vllm:prompt_tokens_total") == before
    assert not labels_of(alone, "vllm:lora_adapter_loaded")


async def _end(stream: Stream) -> None:
    await asyncio.gather(stream, return_exceptions=True)


async def test_the_edge_counts_http_requests_as_vllms_server_does(start_cluster: StartCluster):
    cluster = await start_cluster()
    async with openai_client(cluster) as client:
        await client.completions.create(model="", prompt=PROMPT, max_tokens=2)
    found = await asyncio.to_thread(shown, f"http://{cluster.http_address}")
    wanted = {name: one for name, one in LISTED.items() if name.startswith("http_")}
    assert {name: described(family) for name, family in found.items() if name.startswith("http_")} == wanted
    sizes = {
        sample.name: sample.value
        for sample in found["http_response_size_bytes"].samples
        if sample.labels["handler"] == "/v1/completions"
    }
    assert sizes["http_response_size_bytes_count"] == 1
    assert sizes["http_response_size_bytes_sum"] > 100


async def test_they_can_be_switched_off(start_cluster: StartCluster):
    cluster = await start_cluster("metrics.vllm=false")
    async with client_of(cluster) as client:
        (await client.start(Ask(seed=1))).check(cluster.settings)
    for address in (cluster.metrics_address("worker-0"), cluster.processes["router"].http):
        assert not await asyncio.to_thread(scraped, address)
