"""`lorrery load` over HTTP and over gRPC, of one cluster: the same requests bring the same counts."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

import lorrery
from lorrery.loadgen.options import LoadOptions, ProtocolName
from lorrery.loadgen.report import LoadReport
from lorrery.loadgen.session import load_cluster
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.settings.sections import TlsSettings
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import PATIENCE_SECONDS, running_cluster
from tests.cluster.test_counts import Counted, counted

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

OPTIONS = LoadOptions(
    num_requests=24, concurrency=12, input_range=(1, 200), output_range=(1, 30), adapters="all", warmup=2
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all, which shares prefixes."""
    settings = (
        "scheduler.policy=fcfs",
        "scheduler.memory=paged",
        "scheduler.batching=mixed",
        "scheduler.max_num_batched_tokens=4096",
        "scheduler.prefix_cache.kind=blocks",
    )
    async with running_cluster(tmp_path_factory.mktemp("cluster"), *settings) as cluster:
        yield cluster
        await nothing_held(cluster)


async def play(cluster: LocalCluster, protocol: ProtocolName, options: LoadOptions = OPTIONS) -> LoadReport:
    """Return the report of a run in that protocol, in which nothing failed."""
    target = cluster.router_address if protocol == "grpc" else cluster.http_address
    report = await load_cluster(
        replace(options, protocol=protocol, target=target),
        tls=TlsSettings(),
        registry=CollectorRegistry(),
        connect_timeout_seconds=60.0,
        console=Console(quiet=True),
    )
    assert report.summary.by_status == {"OK": report.summary.num_requests}, report.outcomes.detail
    return report


async def test_every_protocol_counts_the_same_tokens(cluster: LocalCluster) -> None:
    """Text has one more, that begins a sequence; S-LoRA's events say nothing of prompts."""
    ids = await play(cluster, "openai", replace(OPTIONS, prompt_ids=True))
    grpc = await play(cluster, "grpc")
    assert ids.outcomes.adapter_id == grpc.outcomes.adapter_id
    assert ids.outcomes.prompt_tokens.tolist() == grpc.outcomes.prompt_tokens.tolist()
    assert ids.outcomes.output_tokens.tolist() == grpc.outcomes.output_tokens.tolist()
    text = await play(cluster, "openai")
    assert text.outcomes.prompt_tokens.tolist() == (grpc.outcomes.prompt_tokens + 1).tolist()
    for protocol in ("openai", "openai-chat", "slora"):
        report = text if protocol == "openai" else await play(cluster, protocol)
        assert report.outcomes.output_tokens.tolist() == grpc.outcomes.output_tokens.tolist(), protocol
        assert report.cluster.model == grpc.cluster.model


SESSIONS = replace(OPTIONS, workload="chat", num_requests=12, concurrency=3, turns=(3, 3), think=0.05, warmup=0)


async def test_sessions_have_the_same_cached_tokens_and_series_live_as_simulated(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """A turn finds the conversation before it in the cache, the answers included, which the client sends back."""
    options = replace(SESSIONS, shared_prefix=(64, 1), concurrency=1, seed=7)
    before = await counts_of_requests(cluster)
    live = await play(cluster, "grpc", options)
    after = await counts_of_requests(cluster)
    metrics = tmp_path / "metrics.txt"
    simulated = lorrery.simulate(cluster.settings, options, workers=1, metrics=metrics).report
    found = {key: number - before.get(key, 0) for key, number in after.items()}
    assert counts_in(metrics.read_text()) == found
    assert all(sum(number for (key, _), number in found.items() if key.startswith(name)) for name in COUNTED)
    assert live.outcomes.prompt_tokens.tolist() == simulated.outcomes.prompt_tokens.tolist()
    assert live.outcomes.cached_tokens.tolist() == simulated.outcomes.cached_tokens.tolist()
    assert live.outcomes.adapter_id == simulated.outcomes.adapter_id
    assert live.summary.cached_tokens > live.summary.input_tokens / 3


COUNTED = tuple(
    f"lorrery_scheduler_{name}"
    for name in (
        *("requests_total", "prompt_tokens", "output_tokens", "prefix_cache_queries", "prefix_cache_hits"),
        *("step_seconds", "batch_size", "batch_tokens", "queue_seconds", "time_to_first_token", "request_phase"),
        "tenant_service_tokens",
    )
)
"""Series that requests one after the other, on a cluster that has had others, determine."""


async def counts_of_requests(cluster: LocalCluster) -> Counted:
    await nothing_held(cluster)
    text = await asyncio.to_thread(fetched, f"http://{cluster.metrics_address('scheduler')}/metrics")
    return counts_in(text)


def counts_in(text: str) -> Counted:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {key: number for key, number in counted(families).items() if key[0].startswith(COUNTED)}


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
        return str(response.read().decode())


@pytest.mark.parametrize("protocol", ["openai", "openai-chat"])
async def test_sessions_find_their_prefix_over_http(cluster: LocalCluster, protocol: ProtocolName) -> None:
    """Text that goes back is the same tokens as it came, in a chat template too."""
    report = await play(cluster, protocol, replace(SESSIONS, seed=len(protocol)))
    cached, prompts = report.outcomes.cached_tokens, report.outcomes.prompt_tokens
    for first in range(0, 12, 3):
        for row in (first + 1, first + 2):
            before = prompts[row - 1] + report.outcomes.output_tokens[row - 1]
            assert cached[row] >= before - 2 * 16, (cached.tolist(), prompts.tolist())
