"""A span of a request, and the interface of exporters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from lorrery.service.telemetry.trace_context import TraceContext

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
