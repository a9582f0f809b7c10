"""Spans of requests, and W3C trace context: a request's trace in the headers `traceparent` and `tracestate`.

    traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
                 version, trace id, id of the caller's span, flags (1: sampled)

OpenTelemetry's API parses these headers too, but it is imported only for export, whereas this runs for every request. A
malformed header is ignored, as the standard requires; a test compares this parser with OpenTelemetry's.
https://www.w3.org/TR/trace-context/
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
MAX_STATE_CHARACTERS = 512
"""Size that the standard requires to be passed on; a longer state is dropped."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, as its children refer to it.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        sampled: whether the spans of this trace are kept.
        state: opaque state of tracing systems, passed on unchanged.
    """

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header that names this span as parent."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02d}"

    def child(self) -> "TraceContext":
        """Return a new span of the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.sampled, self.state)

    @property
    def log_fields(self) -> dict[str, str]:
        """Its fields in log lines."""
        return {"trace_id": self.trace_id, "span_id": self.span_id}


def log_fields(context: TraceContext | None) -> dict[str, str]:
    """Return a request's fields in log lines; empty: it is not traced."""
    return {} if context is None else context.log_fields


def new_span_id() -> str:
    """Return a new random span id."""
    return secrets.token_hex(8)


def read_trace_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse the headers; None: they name no span."""
    found = _FORM.fullmatch(traceparent.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (more is not None and version == "00") or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = tracestate if len(tracestate) <= MAX_STATE_CHARACTERS and tracestate.isascii() else ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)


def read_headers(headers: Iterable[tuple[str, str]]) -> TraceContext | None:
    """Return the caller's span from a call's headers, whose names are in lower case; None: they name none."""
    parents, states = [], []
    for name, value in headers:
        if name == TRACEPARENT:
            parents.append(value)
        elif name == TRACESTATE:
            states.append(value)
    return read_trace_context(parents[0], ",".join(states)) if len(parents) == 1 else None


Value = str | bool | int | float | Sequence[str]


class Kind(Enum):
    """Kind of a span, by OpenTelemetry's names."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A momentary event within a span."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value]


@dataclass(slots=True)
class Span:
    """A finished span; times are Unix nanoseconds.

    Attributes:
        context: its own.
        parent: None: it is the root of its trace.
        error: why it failed; None: it did not.
    """

    name: str
    context: TraceContext
    parent: TraceContext | None
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    kind: Kind = Kind.INTERNAL
    events: Sequence[SpanEvent] = ()
    error: str | None = None


class SpanExporter(Protocol):
    """Sends spans in a thread of its own."""

    num_taken: int
    """Spans that have left the queue: sent or given up."""
    num_failed: int
    """Those of them that no collector accepted."""

    def put(self, span: Span) -> None:
        """Queue a span; never waits."""
        ...

    def close(self) -> None:
        """Send the queued spans; may block as long as the collector does."""
        ...

    def abandon(self) -> None:
        """Give up the spans that `close` is still sending."""
        ...
