"""Spans of requests: sampling, time stamps and export.

A service records what happens to a sampled request, and makes its spans at the request's end from times that it has
anyway; nothing is done per token or step. An unsampled request costs one random number. Export is left to OpenTelemetry
(`service.telemetry.otlp`), which is imported only if tracing is on.

Spans have Unix times, computed from the monotonic clock with an offset measured once at process start, so a span never
ends before it began. The time of day has no other use.
"""

import asyncio
import contextlib
import os
import random
import threading
import time

from prometheus_client import CollectorRegistry

from lorrery.service.errors import SettingsError
from lorrery.service.installed import has_extra, missing_extra, need_extra
from lorrery.service.names import quoted
from lorrery.service.settings.sections import TracingSettings
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.series import Exporter, Sample, Series
from lorrery.service.telemetry.spans import Span, SpanExporter, TraceContext, new_span_id

NS_PER_SECOND = 1_000_000_000
CLOSE_SECONDS = 2.0
"""How long an ending process waits for a collector to take its last spans."""
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

SPANS = Series(
    "lorrery_tracing_spans_total",
    "spans",
    "Spans of sampled requests, by outcome.",
    ("outcome",),
    more="`exported`; `failed`: no collector accepted them; `dropped`: `tracing.max_queued_spans` were already queued."
    " Only where [tracing](monitoring.md#tracing) is on.",
)

_log = get_logger("service.telemetry.tracing")


class Sampler:
    """Decides which requests are traced.

    Args:
        ratio: share of requests to sample if the client has not decided.
        parent_based: whether a client's decision is followed.
    """

    def __init__(self, ratio: float, *, parent_based: bool = True) -> None:
        self._bound = round(ratio * 2**64)
        self._parent_based = parent_based

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """Return a new span, a child of `parent` if there is one; for an unsampled request, `parent` itself.

        Returns:
            None if there is no parent and the request is not sampled.
        """
        if parent is not None:
            sampled = parent.sampled if self._parent_based else self._keeps(int(parent.trace_id, 16))
            return TraceContext(parent.trace_id, new_span_id(), True, parent.state) if sampled else parent
        trace_id = random.getrandbits(128)
        if not self._keeps(trace_id) or not trace_id:
            return None
        return TraceContext(f"{trace_id:032x}", new_span_id(), True)

    def _keeps(self, trace_id: int) -> bool:
        """Decide as OpenTelemetry's TraceIdRatioBased does, so that services with one ratio keep the same traces."""
        return trace_id & (2**64 - 1) < self._bound


class Tracer:
    """The spans of one process.

    Args:
        sampler: decides which are kept.
        exporter: sends them.
        max_queued: upper bound on queued spans; more are dropped.
        registry: for the metrics of exported spans.
    """

    def __init__(self, sampler: Sampler, exporter: SpanExporter, max_queued: int, registry: CollectorRegistry) -> None:
        self.begin = sampler.begin
        self._exporter = exporter
        self._max_queued = max_queued
        self._num_put = self._num_dropped = 0
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        Exporter(registry, [SPANS]).read(SPANS, self._read)

    def unix_ns(self, monotonic_seconds: float) -> int:
        """Convert a time of `time.monotonic` to Unix time."""
        return self._offset_ns + round(monotonic_seconds * NS_PER_SECOND)

    def end(self, span: Span) -> None:
        """Queue a finished span if its trace is sampled; if the queue is full, drop and count it."""
        if not span.context.sampled:
            return
        if self._num_put - self._exporter.num_taken >= self._max_queued:
            self._num_dropped += 1
            return
        self._num_put += 1
        self._exporter.put(span)

    async def close(self) -> None:
        """Send the queued spans, within `CLOSE_SECONDS`."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def close() -> None:
            self._exporter.close()
            with contextlib.suppress(RuntimeError):  # no task waits any longer, and the loop is closed
                loop.call_soon_threadsafe(closed.set)

        # Not a thread of asyncio's pool, which the end of the process would wait for.
        closing = threading.Thread(target=close, name="last spans", daemon=True)
        closing.start()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await closed.wait()
        except TimeoutError:
            self._exporter.abandon()
            _log.warning("spans_lost", num=self._num_put - self._exporter.num_taken, after_seconds=CLOSE_SECONDS)
        else:
            closing.join()

    def _read(self) -> "list[Sample]":
        taken, failed = self._exporter.num_taken, self._exporter.num_failed
        return [(("exported",), taken - failed), (("failed",), failed), (("dropped",), self._num_dropped)]


def open_tracer(settings: TracingSettings, service: str, registry: CollectorRegistry) -> Tracer | None:
    """Return the tracer of a process; None: tracing is off.

    Args:
        settings: where spans go; if unset, OpenTelemetry's own environment variables apply.
        service: name of the service.
        registry: for the metrics of exported spans.

    Raises:
        SettingsError: OpenTelemetry is not installed, or its variables are invalid.
    """
    endpoint = settings.endpoint or _endpoint_of_environment()
    if endpoint is None:
        return None
    sampler = _sampler(settings.sampling_ratio)
    if settings.endpoint is not None:
        need_extra("tracing", f"tracing.endpoint {quoted(endpoint)}")
    elif not has_extra("tracing"):  # variables meant for other programs must not stop this one
        _log.warning("tracing_off", endpoint=endpoint, reason=missing_extra("tracing", "it"))
        return None
    from lorrery.service.telemetry import otlp

    exporter = otlp.OtlpExporter(settings, endpoint, service)
    _log.info("tracing", endpoint=endpoint, protocol=exporter.protocol)
    return Tracer(sampler, exporter, settings.max_queued_spans, registry)


def _endpoint_of_environment() -> str | None:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    return next((endpoint for name in _ENDPOINT_VARIABLES if (endpoint := os.environ.get(name))), None)


def _sampler(ratio: float | None) -> Sampler:
    """Return the sampler that `tracing.sampling_ratio`, or else the environment, configures; default: sample all."""
    if ratio is not None:
        return Sampler(ratio)
    name = os.environ.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    kind = name.removeprefix("parentbased_")
    ratios = {"always_on": "1", "always_off": "0", "traceidratio": os.environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"}
    try:
        value = float(ratios[kind])
    except (KeyError, ValueError):
        value = -1.0
    if not 0 <= value <= 1:
        raise SettingsError(
            f"OTEL_TRACES_SAMPLER={name}, OTEL_TRACES_SAMPLER_ARG={os.environ.get('OTEL_TRACES_SAMPLER_ARG', '')}:"
            " always_on, always_off or traceidratio with a ratio from 0 to 1 expected, with or without parentbased_"
            " before it; or set tracing.sampling_ratio"
        )
    return Sampler(value, parent_based=kind != name)
