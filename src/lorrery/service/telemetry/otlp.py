"""Sends spans to a collector with OpenTelemetry's SDK: OTLP over gRPC or HTTP. Imported only if tracing is on.

The SDK's batch processor queues spans and sends them in a thread of its own; nothing here waits for a collector. What
the settings do not set, OpenTelemetry's own environment variables do (headers, certificates, time-outs, compression,
resource attributes, limits of a span).
"""

import logging
import os
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from lorrery.service.errors import SettingsError
from lorrery.service.installed import VERSION
from lorrery.service.settings.sections import TracingSettings
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.spans import Kind, Span, TraceContext

_HTTP_PORT = 4318
_BATCH_SPANS = 512
_SEND_AFTER_MS = 1000.0
_TELL_EVERY_SECONDS = 60.0
"""Interval of log lines about an unreachable collector, which would otherwise come with each batch."""
_log = get_logger("service.telemetry.otlp")
_KINDS = {kind: trace.SpanKind[kind.value] for kind in Kind}


class OtlpExporter:
    """See `service.telemetry.spans.SpanExporter`.

    Args:
        settings: of tracing.
        endpoint: of the collector.
        service: name of the service.

    Raises:
        SettingsError: the CA file cannot be read.
    """

    def __init__(self, settings: TracingSettings, endpoint: str, service: str) -> None:
        self.protocol = _protocol(settings, endpoint)
        self.num_taken = self.num_failed = 0
        self._ids = _PresetIds()
        self._exporter = _exporter(settings, endpoint, self.protocol)
        self._processor = BatchSpanProcessor(
            _Counting(self._exporter, self, endpoint),
            max_queue_size=max(settings.max_queued_spans, _BATCH_SPANS),
            max_export_batch_size=min(settings.max_queued_spans, _BATCH_SPANS),
            schedule_delay_millis=_SEND_AFTER_MS,
        )
        resource = Resource.create(
            {
                "service.name": f"{settings.service_name}-{service}",
                "service.version": VERSION,
                "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
            }
        )
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("lorrery", VERSION)
        # OpenTelemetry's own log lines about failures that `_Counting` reports.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def put(self, span: Span) -> None:
        """See `SpanExporter`."""
        self._ids.trace_id, self._ids.span_id = int(span.context.trace_id, 16), int(span.context.span_id, 16)
        parent = trace.INVALID_SPAN if span.parent is None else trace.NonRecordingSpan(_span_context(span.parent))
        made = self._tracer.start_span(
            span.name,
            trace.set_span_in_context(parent),
            kind=_KINDS[span.kind],
            attributes=span.attributes,
            start_time=span.begin_ns,
        )
        for event in span.events:
            made.add_event(event.name, event.attributes, event.at_ns)
        if span.error is not None:
            made.set_status(trace.StatusCode.ERROR, span.error)
        made.end(max(span.begin_ns, span.end_ns))

    def close(self) -> None:
        """See `SpanExporter`."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        """See `SpanExporter`."""
        self._exporter.shutdown()


class _PresetIds(IdGenerator):
    """Gives a span the id that was already sent to others."""

    trace_id = span_id = 0

    def generate_span_id(self) -> int:
        """Return the id of the span being created."""
        return self.span_id

    def generate_trace_id(self) -> int:
        """Return the id of its trace."""
        return self.trace_id


class _Counting(SpanExporter):
    """Counts what an exporter sends, in its thread, and logs what no collector accepts."""

    def __init__(self, inner: SpanExporter, counts: OtlpExporter, endpoint: str) -> None:
        self._inner, self._counts, self._endpoint = inner, counts, endpoint
        self._told = -_TELL_EVERY_SECONDS

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch, and count it after success or failure."""
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._tell(self._counts.num_failed + len(spans))
                self._counts.num_failed += len(spans)
            self._counts.num_taken += len(spans)
        return result

    def _tell(self, num_failed: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_EVERY_SECONDS:
            self._told = now
            _log.warning(
                "spans_not_taken",
                endpoint=self._endpoint,
                protocol=self._counts.protocol,
                num_failed=num_failed,
                hint="see tracing.endpoint and tracing.protocol",
            )

    def shutdown(self) -> None:
        """Shut the inner exporter down."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the inner exporter; nothing is buffered here."""
        return self._inner.force_flush(timeout_millis)


def _span_context(context: TraceContext) -> trace.SpanContext:
    return trace.SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED if context.sampled else trace.TraceFlags.DEFAULT),
        trace_state=trace.TraceState.from_header([context.state]) if context.state else trace.TraceState(),
    )


def _protocol(settings: TracingSettings, endpoint: str) -> str:
    said = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or ""
    if settings.protocol is not None:
        return settings.protocol
    if said and settings.endpoint is None:
        return "grpc" if said == "grpc" else "http"
    url = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    return "http" if url.port == _HTTP_PORT or url.path.strip("/") else "grpc"


def _exporter(settings: TracingSettings, endpoint: str, protocol: str) -> SpanExporter:
    """Return the SDK's exporter for a protocol; imported only when needed, because both are slow to import."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    headers = dict(settings.headers) or None
    if protocol == "grpc":
        import grpc
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        credentials = grpc.ssl_channel_credentials(_read(settings)) if settings.ca is not None else None
        lower = None if headers is None else {name.lower(): value for name, value in headers.items()}
        return GrpcExporter(endpoint=url, credentials=credentials, headers=lower)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    if settings.endpoint is None and "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in os.environ:
        whole = url  # this variable has the path, the other one has not
    else:
        whole = url if urlsplit(url).path.strip("/") and settings.endpoint else f"{url.rstrip('/')}/v1/traces"
    if settings.ca is not None:
        _read(settings)
    return HttpExporter(
        endpoint=whole, certificate_file=None if settings.ca is None else str(settings.ca), headers=headers
    )


def _read(settings: TracingSettings) -> bytes:
    assert settings.ca is not None
    try:
        return settings.ca.read_bytes()
    except OSError as error:
        raise SettingsError(f"tracing.ca: {settings.ca}: {error.strerror}") from None
