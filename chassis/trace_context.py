"""W3C trace context: which trace a request belongs to, as headers `traceparent` and `tracestate` say it.

    traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
                 version, trace id, id of the caller's span, flags (1: sampled)

OpenTelemetry's API reads these headers too, but it is imported only where spans are exported, and this is read for
every request. What is no such header counts for nothing, as the standard wants it; a test holds this to OpenTelemetry's
own reading. https://www.w3.org/TR/trace-context/
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
MAX_STATE_CHARACTERS = 512
"""The standard asks to pass on so much; a longer state is dropped whole."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, as those that belong below it know it.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        sampled: whether the spans of this trace are kept.
        state: what tracing systems pass on, as it came.
    """

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header that names this span as the parent."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02d}"

    def child(self) -> "TraceContext":
        """Return a new span of the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.sampled, self.state)

    @property
    def log_fields(self) -> dict[str, str]:
        """What lines of the log say."""
        return {"trace_id": self.trace_id, "span_id": self.span_id}


def log_fields(context: TraceContext | None) -> dict[str, str]:
    """Return what lines of the log say of a request; nothing if it belongs to no trace."""
    return {} if context is None else context.log_fields


def new_span_id() -> str:
    """Return an id that no other span has."""
    return secrets.token_hex(8)


def read(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Return the span that a header names; None: it names none."""
    found = _FORM.fullmatch(traceparent.strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (more is not None and version == "00") or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = tracestate if len(tracestate) <= MAX_STATE_CHARACTERS and tracestate.isascii() else ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)


def read_headers(headers: Iterable[tuple[str, str]]) -> TraceContext | None:
    """Return the span that a call's headers, with names in lower case, say it comes from; None: they name none."""
    parents, states = [], []
    for name, value in headers:
        if name == TRACEPARENT:
            parents.append(value)
        elif name == TRACESTATE:
            states.append(value)
    return read(parents[0], ",".join(states)) if len(parents) == 1 else None
