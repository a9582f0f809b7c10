"""`lorrery load` over HTTP and over gRPC, of one cluster: the same requests bring the same counts."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from rich.console import Console

from lorrery.chassis.sections import TlsSettings
from lorrery.loadgen.options import LoadOptions, ProtocolName
from lorrery.loadgen.report import LoadReport
from lorrery.loadgen.session import load_cluster
from lorrery.local.cluster import LocalCluster
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster

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
        connect_timeout_seconds=10.0,
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
