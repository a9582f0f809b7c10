"""A span of a request, and what sends such."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from lorrery.chassis.trace_context import TraceContext

Value = str | bool | int | float | Sequence[str]


class Kind(Enum):
    """Whose side of a call a span is, by OpenTelemetry's names."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """What happened within a span at a moment."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value]


@dataclass(slots=True)
class Span:
    """A span that is over; times are Unix nanoseconds.

    Attributes:
        context: its own.
        parent: None: it is a trace's first.
        error: why it failed; None: it has not.
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
    """Sends spans, in a thread of its own."""

    num_taken: int
    """Spans that have left the queue: sent, or given up."""
    num_failed: int
    """Those of them that no collector has taken."""

    def put(self, span: Span) -> None:
        """Queue a span; never waits."""
        ...

    def close(self) -> None:
        """Send what is queued; may take as long as the collector does."""
        ...

    def abandon(self) -> None:
        """Give up what `close` still sends."""
        ...
