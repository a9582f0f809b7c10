"""Headers of W3C trace context: read as OpenTelemetry's own reader does, hostile ones included."""

import pytest
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lorrery.service.telemetry.spans import TraceContext, read_headers, read_trace_context
from lorrery.service.telemetry.tracing import Sampler

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "header",
    [
        GOOD,
        f"00-{TRACE}-{SPAN}-00",
        f"00-{TRACE}-{SPAN}-03",
        f"01-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-zz",
        f" {GOOD} ",
        f"{GOOD},{GOOD}",
        "",
        "00",
        "-" * 10_000,
        "00-" + "a" * 100_000,
        f"\uff10\uff10-{TRACE}-{SPAN}-01",
        f"00-{chr(0x663) * 32}-{SPAN}-01",
    ],
)
def test_a_header_is_read_as_opentelemetry_reads_it(header: str):
    theirs = trace.get_current_span(TraceContextTextMapPropagator().extract({"traceparent": header}))
    context = theirs.get_span_context()
    expected = None
    if context.is_valid:
        expected = TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled)
    assert read_trace_context(header) == expected


def test_two_parents_are_none():
    assert read_headers([("traceparent", GOOD), ("traceparent", GOOD)]) is None
    assert read_headers([("x-traceparent", GOOD)]) is None


def test_states_are_joined_and_passed_on():
    context = read_headers([("tracestate", "a=1"), ("traceparent", GOOD), ("tracestate", "b=2")])
    assert context == TraceContext(TRACE, SPAN, True, "a=1,b=2")
    assert context.child().state == "a=1,b=2"
    assert context.traceparent == GOOD


@pytest.mark.parametrize("state", ["x" * 513, "a=\u00e9"])
def test_a_state_that_cannot_be_passed_on_is_dropped_and_the_parent_kept(state: str):
    assert read_trace_context(GOOD, state) == TraceContext(TRACE, SPAN, True)


def test_a_client_decides_whether_its_trace_is_kept():
    kept, not_kept = read_trace_context(GOOD), read_trace_context(f"00-{TRACE}-{SPAN}-00")
    assert not_kept is not None
    assert kept is not None
    never, always = Sampler(0.0), Sampler(1.0)
    below = never.begin(kept)
    assert below is not None
    assert (below.trace_id, below.sampled) == (TRACE, True)
    assert below.span_id != SPAN
    assert always.begin(not_kept) == not_kept
    assert never.begin(None) is None
    assert (first := always.begin(None)) is not None
    assert first.sampled


def test_without_a_client_the_ratio_decides():
    kept = sum(Sampler(0.25).begin(None) is not None for _ in range(4000))
    assert 800 < kept < 1200
