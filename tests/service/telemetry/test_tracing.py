"""Where spans go, and what becomes of those that find no room; the collector reads real bytes."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.sdk.trace.export import SpanExportResult
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from lorrery.service.errors import SettingsError
from lorrery.service.settings.sections import TracingSettings
from lorrery.service.telemetry.spans import Span, SpanEvent, TraceContext
from lorrery.service.telemetry.tracing import Tracer, open_tracer
from tests.cluster.harness import wait_until
from tests.collector import Collector

CONTEXT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True, "other=1")
PARENT = TraceContext(CONTEXT.trace_id, "00f067aa0ba902b7", True)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorrery.service.telemetry.tracing.CLOSE_SECONDS", 60.0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def spans(registry: CollectorRegistry, outcome: str) -> float | None:
    return registry.get_sample_value("lorrery_tracing_spans_total", {"outcome": outcome})


def made(name: str = "work") -> Span:
    span = Span(name, CONTEXT, PARENT, 1_000, 3_000, {"words": ("a", "b"), "number": 2**40})
    span.events, span.error = [SpanEvent("event", 2_000, {"yes": True})], "why"
    return span


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_span_arrives_as_it_was_made(protocol: str, collector: Collector):
    endpoint = collector.grpc_endpoint if protocol == "grpc" else collector.http_endpoint
    registry = CollectorRegistry()
    settings = TracingSettings(endpoint=endpoint, headers={"X-Token": "secret"}, service_name="ours")
    tracer = open_tracer(settings, "router", registry)
    assert tracer is not None
    tracer.end(made())
    tracer.end(Span("not kept", TraceContext(CONTEXT.trace_id, "1" * 16, False), None, 0, 1))
    await tracer.close()
    (span,) = collector.spans
    assert (span.trace_id, span.span_id, span.parent_id) == (CONTEXT.trace_id, CONTEXT.span_id, PARENT.span_id)
    assert (span.name, span.service, span.begin_ns, span.end_ns) == ("work", "ours-router", 1_000, 3_000)
    assert span.attributes == {"words": ["a", "b"], "number": 2**40}
    assert (span.events, span.error) == ([("event", {"yes": True})], "why")
    assert collector.headers[0]["x-token"] == "secret"
    assert (spans(registry, "exported"), spans(registry, "failed"), spans(registry, "dropped")) == (1, 0, 0)


async def test_the_environment_says_where_spans_go_and_which_are_kept(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.http_endpoint.removesuffix("/v1/traces"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer = open_tracer(TracingSettings(), "router", CollectorRegistry())
    assert tracer is not None
    assert tracer.begin(None) is None
    assert tracer.begin(PARENT) is not None
    tracer.end(made())
    await tracer.close()
    assert [span.name for span in collector.spans] == ["work"]
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "jaeger_remote")
    with pytest.raises(SettingsError, match=r"OTEL_TRACES_SAMPLER=jaeger_remote.*tracing\.sampling_ratio"):
        open_tracer(TracingSettings(), "router", CollectorRegistry())
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracer(TracingSettings(), "router", CollectorRegistry()) is None


async def test_what_finds_no_room_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch):
    registry = CollectorRegistry()
    tracer = open_tracer(TracingSettings(endpoint="127.0.0.1:9", max_queued_spans=2), "router", registry)
    assert tracer is not None
    monkeypatch.setattr("lorrery.service.telemetry.tracing.CLOSE_SECONDS", 0.05)
    for _ in range(5):
        tracer.end(made())
    assert spans(registry, "dropped") == 3
    async with asyncio.timeout(60):
        await tracer.close()  # gives up, since there is no collector


async def test_a_collector_that_takes_nothing_is_told_once_a_minute(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GrpcExporter, "export", lambda *_: SpanExportResult.FAILURE)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("lorrery.service.telemetry.otlp.time", SimpleNamespace(monotonic=lambda: clock.now))
    registry = CollectorRegistry()
    tracer = open_tracer(TracingSettings(endpoint="127.0.0.1:11", max_queued_spans=1), "router", registry)
    assert tracer is not None
    with capture_logs() as lines:
        for num_failed, clock.now in ((1, 100.0), (2, 159.0), (3, 161.0)):
            tracer.end(made())
            await wait_until(partial(spans_are, registry, num_failed))
        await tracer.close()
    told = [line for line in lines if line.get("endpoint") == "127.0.0.1:11"]
    assert [(line["event"], line["protocol"], line["num_failed"]) for line in told] == [
        ("spans_not_taken", "grpc", 1),
        ("spans_not_taken", "grpc", 3),
    ]


async def spans_are(registry: CollectorRegistry, num_failed: int) -> bool:
    return (spans(registry, "failed"), spans(registry, "exported")) == (num_failed, 0)  # both have been counted


@pytest.mark.parametrize("endpoint", ["ftp://host:1", "http://", "http://host:0", "http://host:x", "host:99999"])
def test_what_is_no_collector_is_refused(endpoint: str):
    with pytest.raises(ValueError, match="http://HOST:PORT or https://HOST:PORT expected"):
        TracingSettings(endpoint=endpoint)


def test_a_missing_file_of_authorities_is_named(tmp_path: Path):
    settings = TracingSettings(endpoint="https://127.0.0.1:4317", ca=tmp_path / "none.pem")
    with pytest.raises(SettingsError, match=r"tracing\.ca: .*none\.pem: No such file"):
        open_tracer(settings, "router", CollectorRegistry())


def test_unix_times_follow_the_monotonic_clock():
    tracer = Tracer.__new__(Tracer)
    tracer._offset_ns = 10**18
    assert tracer.unix_ns(2.5) == 10**18 + 2_500_000_000
