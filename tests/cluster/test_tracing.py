"""Traces of requests through a real cluster, as a collector gets them."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, Stream, client_of
from tests.cluster.engines import PORTS, Engines, native, sglang, smg
from tests.cluster.harness import metric, running_cluster, wait_until
from tests.collector import Collector, Got

pytestmark = pytest.mark.cluster

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TOLERANCE = 1e-6
"""Of times that are rounded to nanoseconds, in floats of seconds."""


PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
EXEMPLARS = {
    "router": {
        "lorrery_router_time_to_first_token_seconds",
        "lorrery_router_time_per_output_token_seconds",
        "lorrery_router_e2e_request_latency_seconds",
    },
    "scheduler": {"lorrery_scheduler_queue_seconds"},
}


def scraped(address: str, accept: str) -> tuple[dict[str, str], set[str]]:
    """Return the traces of exemplars by the metric that has them, and the names of all samples."""
    with urllib.request.urlopen(urllib.request.Request(address, headers={"accept": accept}), timeout=60) as response:
        text, kind = response.read().decode(), response.headers["content-type"]
    parse = openmetrics.text_string_to_metric_families
    if "openmetrics" in accept:
        assert kind.startswith("application/openmetrics-text"), kind
    else:
        assert kind.startswith("text/plain"), kind
        parse = text_string_to_metric_families
    families = list(parse(text))
    samples = [sample for family in families for sample in family.samples]
    exemplars = {
        sample.name.removesuffix("_bucket"): sample.exemplar.labels["trace_id"] for sample in samples if sample.exemplar
    }
    return exemplars, {sample.name for sample in samples}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
async def traced(tmp_path: Path, collector: Collector) -> AsyncIterator[LocalCluster]:
    collector.spans.clear()
    overrides = (f"tracing.endpoint={collector.grpc_endpoint}", "scheduler.worker_timeout_seconds=60")
    ports = [f"router.{name}=127.0.0.1:0" for name in PORTS]
    async with running_cluster(tmp_path, *overrides, *ports, num_workers=2) as cluster:
        yield cluster


def stream_of(client: Client, ask: Ask, *headers: tuple[str, str]) -> Stream:
    stream = Stream(ask, client.stub.Generate(ask.message(), timeout=60, metadata=headers))
    client.streams.append(stream)
    return stream


async def tree(collector: Collector, trace_id: str, name: str, num: int = 1) -> Got:
    """Return a trace once its outermost span and `num` of that name below it are here."""

    def here() -> bool:
        root = collector.tree(trace_id)
        return root is not None and root.service == "lorrery-router" and len(root.all(name)) >= num

    await wait_until(here)
    root = collector.tree(trace_id)
    assert root is not None
    return root


def adds_up(root: Got) -> None:
    """Check that phases follow one another without a gap, and lie within what they are part of."""
    schedule = root.one("schedule")
    phases = [span for span in schedule.children if span.name in {"placement", "queue", "adapter_load", "run"}]
    assert abs(sum(span.seconds for span in phases) - schedule.seconds) < TOLERANCE
    assert (phases[0].begin_ns, phases[-1].end_ns) == (schedule.begin_ns, schedule.end_ns)
    assert [span.begin_ns for span in phases[1:]] == [span.end_ns for span in phases[:-1]]
    prefill, decode = root.one("prefill"), root.one("decode")
    run = root.all("run")[-1]
    late_seconds = max(0.0, (prefill.begin_ns - run.begin_ns) / 1e9)  # where the plan came after its time
    assert abs(late_seconds + prefill.seconds + decode.seconds - run.seconds) < 1e-3
    request, stream, admission = root.one("llm_request"), root.one("stream"), root.one("admission")
    assert admission.begin_ns == request.begin_ns
    assert stream.end_ns == request.end_ns
    assert root.begin_ns <= request.begin_ns <= schedule.begin_ns < stream.begin_ns < stream.end_ns <= root.end_ns


async def test_a_request_is_one_tree_of_spans(
    traced: LocalCluster, collector: Collector, capsys: pytest.CaptureFixture[str]
):
    asked = Ask(1, 100, 20, "lora-1")
    async with client_of(traced) as client:
        parent = f"00-{TRACE}-{SPAN}-01"
        stream = stream_of(client, asked, ("traceparent", parent), ("tracestate", "other=1"))
        usage = (await stream).check(traced.settings)
        root = await tree(collector, TRACE, "decode")

        assert root.name == "lorrery.v1.RouterService/Generate"
        assert (root.parent_id, root.state, root.service) == (SPAN, "other=1", "lorrery-router")
        assert [span.name for span in root.children] == ["llm_request"]
        (request,) = root.children
        assert sorted(span.name for span in request.children) == ["admission", "schedule", "stream"]
        assert [span.name for span in root.one("run").children] == ["prefill", "decode"]
        assert {span.service for span in root.one("run").children} == {"lorrery-worker"}
        adds_up(root)
        said = request.attributes
        assert said["lorrery.adapter"] == said["gen_ai.request.model"] == "lora-1"
        assert said["lorrery.worker"] == root.one("decode").attributes["lorrery.worker"] == usage.worker_id
        assert (said["gen_ai.usage.prompt_tokens"], said["gen_ai.usage.completion_tokens"]) == (100, 20)
        assert said["gen_ai.response.finish_reasons"] == ["length"]
        assert root.attributes["rpc.grpc.status_code"] == 0

        # The histograms name the trace to whoever asks for OpenMetrics, and have the same names for who does not.
        for service in ("router", "scheduler"):
            address = f"http://{traced.metrics_address(service)}/metrics"
            exemplars, names = await asyncio.to_thread(scraped, address, PROMETHEUS_ACCEPTS)
            assert set(exemplars) == EXEMPLARS[service]
            assert set(exemplars.values()) == {TRACE}
            assert await asyncio.to_thread(scraped, address, "text/plain") == ({}, names)
        edge = await asyncio.to_thread(scraped, f"http://{traced.http_address}/metrics", PROMETHEUS_ACCEPTS)
        assert set(edge[0]) == EXEMPLARS["router"]

        # A client that has decided against it; then one whose headers are none.
        await stream_of(client, asked, ("traceparent", f"00-{'ab' * 16}-{SPAN}-00"))
        hostile = [f"00-{'0' * 32}-{SPAN}-01", "00-" + "f" * 4000, parent.upper(), "ff" + parent[2:], "%s" * 50]
        for header in hostile:
            (await stream_of(client, asked, ("traceparent", header), ("tracestate", "=,=,;" * 50))).check(
                traced.settings
            )

        # What is refused says why.
        status, text = await client.failure(Ask(1, adapter_id="unheard-of"))
        assert status is grpc.StatusCode.NOT_FOUND
        await wait_until(lambda: any(span.error and span.name == "llm_request" for span in collector.spans))
        refused = next(span for span in collector.spans if span.error and span.name == "llm_request")
        root = await tree(collector, refused.trace_id, "schedule")
        assert refused.error == f"UNKNOWN_ADAPTER: {text}"
        assert root.attributes["rpc.grpc.status_code"] == status.value[0]
        assert root.one("schedule").error is not None
        printed: list[str] = []

        def logged() -> bool:
            printed.extend(line for line in capsys.readouterr().out.splitlines() if "request_refused" in line)
            return bool(printed)

        await wait_until(logged)
        assert f"trace_id={refused.trace_id}" in printed[0]

        # The other edge. Each of its outputs is one.
        body = json.dumps({"prompt": "Hello", "max_tokens": 5, "n": 2}).encode()
        headers = {"content-type": "application/json", "traceparent": f"00-{'cd' * 16}-{SPAN}-01"}
        asking = urllib.request.Request(f"http://{traced.http_address}/v1/completions", body, headers)
        await asyncio.to_thread(lambda: urllib.request.urlopen(asking, timeout=60).read())
        root = await tree(collector, "cd" * 16, "decode", 2)
        assert (root.name, root.parent_id) == ("POST /v1/completions", SPAN)
        assert root.attributes["http.response.status_code"] == 200
        assert [span.name for span in root.children] == ["llm_request", "llm_request"]

        # The ports at which the router is an engine.
        engines = Engines(traced)
        calls = {
            "vllm.Inference/GenerateStream": (engines.inference.GenerateStream, native(asked)),
            "vllm.grpc.engine.VllmEngine/Generate": (engines.smg.Generate, smg(asked)),
            "sglang.grpc.scheduler.SglangScheduler/Generate": (engines.sglang.Generate, sglang(asked)),
        }
        for number, (call, message) in enumerate(calls.values(), 1):
            await engines.messages(call, message, [("traceparent", f"00-{number:032x}-{SPAN}-01")])
        roots = [await tree(collector, f"{number:032x}", "decode") for number in (1, 2, 3)]
        assert [root.name for root in roots] == list(calls)
        assert {root.parent_id for root in roots} == {SPAN}
        await asyncio.gather(*(channel.close() for channel in engines.channels.values()))

        def traces() -> set[str]:
            return {span.trace_id for span in collector.spans}

        # Two that name a trace, one that is refused, and those whose headers are none.
        await wait_until(lambda: len(traces()) == 2 + 1 + len(hostile) + len(calls))
        assert "ab" * 16 not in traces()
        assert metric(traced.metrics_address("router"), "lorrery_tracing_spans_total", outcome="dropped") == 0
        assert metric(traced.metrics_address("router"), "lorrery_tracing_spans_total", outcome="exported") > 0


async def test_a_request_that_loses_its_worker_and_its_scheduler_stays_one_trace(
    traced: LocalCluster, collector: Collector
):
    asked = Ask(2, 50, 1200, "lora-2")  # which still runs when the loss has been told of
    async with client_of(traced) as client:
        stream = stream_of(client, asked, ("traceparent", f"00-{TRACE}-{SPAN}-01"))
        await stream.at(5)
        running = [
            name
            for name in traced.worker_names
            if metric(traced.metrics_address(name), "lorrery_worker_running_sequences") == 1
        ]
        traced.kill(running[0])
        await stream.at(20)
        await wait_until(lambda: any(span.error == "worker_lost" for span in collector.spans))
        traced.kill("scheduler")
        await traced.restart("scheduler")
        (await stream).check(traced.settings)
        whole = {"lorrery.v1.RouterService/Generate", "schedule", "decode"}
        await wait_until(lambda: whole <= {span.name for span in collector.spans})
    ours = [span for span in collector.spans if span.trace_id == TRACE]
    request = next(span for span in ours if span.name == "llm_request")
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert [name for name, _ in request.events] == ["submitted", "shard_lost", "resumed"]
    schedule = next(span for span in ours if span.name == "schedule")  # the first scheduler took its own along
    assert schedule.parent_id == request.span_id
    assert schedule.attributes["lorrery.resumed"] is True
    lost = next(span for span in ours if span.error == "worker_lost")
    assert (lost.name, lost.attributes["lorrery.worker"]) == ("run", running[0])


async def test_a_collector_that_is_gone_changes_nothing_for_requests(tmp_path: Path):
    overrides = ("tracing.endpoint=http://127.0.0.1:9", "tracing.max_queued_spans=4", "router.drain_seconds=1")
    async with running_cluster(tmp_path, *overrides) as cluster, client_of(cluster) as client:
        streams = [client.start(Ask(seed, max_new_tokens=5)) for seed in range(20)]
        for stream in streams:
            (await stream).check(cluster.settings)
        address = cluster.metrics_address("router")
        assert metric(address, "lorrery_tracing_spans_total", outcome="exported") == 0
        assert metric(address, "lorrery_tracing_spans_total", outcome="dropped") > 0


def test_nothing_of_opentelemetrys_sdk_is_imported_where_tracing_is_off():
    code = (
        "import sys; import lorrery.scheduler.service, lorrery.worker.service;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')]);"
        "import lorrery.router.service;"  # FastAPI imports OpenTelemetry's API
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
