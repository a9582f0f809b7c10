"""The spans of a router: a client's call, and each output of the call.

    lorrery.v1.RouterService/Generate, or POST /v1/completions      the call, under its client's name for it
      llm_request                                                   one output; vLLM's name for it
        admission                                                   from its arrival until it goes to a scheduler
        (the scheduler's spans)
        stream                                                      from the message of its first token to its last

An edge opens a call, and whatever happens while it is served belongs to it; the handler gets it from `current()`. A
call that is not sampled has no spans, but if its client names a trace, log lines and messages to schedulers carry its
id.
"""

import contextlib
import time
from collections.abc import Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

import grpc
import structlog

from lorrery.router.request import Finish, Request
from lorrery.router.timing import Timing
from lorrery.service.errors import RequestError
from lorrery.service.network import status
from lorrery.service.telemetry.spans import Kind, Span, SpanEvent, TraceContext, Value, read_headers
from lorrery.service.telemetry.tracing import Tracer

MAX_ERROR_CHARACTERS = 1000

_FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
"""Statuses that are server errors by OpenTelemetry's conventions; other statuses are the client's errors."""

_current: ContextVar["CallTrace | None"] = ContextVar("call", default=None)


def current() -> "CallTrace | None":
    """Return the call that is being served; None: it is not traced."""
    return _current.get()


class CallTraces:
    """Opens the traces of a router's calls.

    Args:
        tracer: receives spans; None: tracing is off.
    """

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    def grpc(self, context: status.Context, method: str) -> "CallTrace | contextlib.nullcontext[None]":
        """Return the context manager in which a gRPC call is served; `method`: SERVICE/METHOD."""
        if self._tracer is None:
            return contextlib.nullcontext()
        metadata = context.invocation_metadata() or ()
        headers = ((name, value if isinstance(value, str) else "") for name, value in metadata)
        service, _, name = method.rpartition("/")
        return self._begin(headers, method, {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name})

    def http(self, scope: Any) -> "CallTrace | contextlib.nullcontext[None]":  # noqa: ANN401  ASGI's own
        """Return the context manager in which an HTTP request is served."""
        if self._tracer is None or scope["method"] != "POST":
            return contextlib.nullcontext()
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        attributes = {"http.request.method": "POST", "url.path": scope["path"], "url.scheme": scope["scheme"]}
        return self._begin(headers, "POST", attributes)

    def _begin(
        self, headers: Iterable[tuple[str, str]], name: str, attributes: dict[str, Value]
    ) -> "CallTrace | contextlib.nullcontext[None]":
        assert self._tracer is not None
        parent = read_headers(headers)
        context = self._tracer.begin(parent)
        if context is None:
            return contextlib.nullcontext()
        return CallTrace(self._tracer, context, parent, name, attributes)


class CallTrace:
    """One call of a client; serve it inside `with`.

    Attributes:
        context: its span, or if it is not sampled its client's.
    """

    def __init__(
        self,
        tracer: Tracer,
        context: TraceContext,
        parent: TraceContext | None,
        name: str,
        attributes: dict[str, Value],
    ) -> None:
        self.context = context
        self._tracer, self._parent, self._name, self._attributes = tracer, parent, name, attributes
        self._began = time.monotonic()
        self._error: str | None = None
        self._within = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Make this the current call."""
        self._within.callback(_current.reset, _current.set(self))
        self._within.enter_context(structlog.contextvars.bound_contextvars(**self.context.log_fields))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the span; an exception that passes through sets its status."""
        self._within.close()
        if "rpc.method" in self._attributes:
            self._end_rpc(error)
        self._tracer.end(
            Span(
                self._name,
                self.context,
                self._parent,
                self._tracer.unix_ns(self._began),
                self._tracer.unix_ns(time.monotonic()),
                self._attributes,
                Kind.SERVER,
                error=self._error,
            )
        )

    def _end_rpc(self, error: BaseException | None) -> None:
        code = grpc.StatusCode.OK
        if isinstance(error, RequestError):
            code = status.grpc_status(error)
            self._attributes["error.type"] = error.reason.name
        elif error is not None:
            code = grpc.StatusCode.INTERNAL if isinstance(error, Exception) else grpc.StatusCode.CANCELLED
        self._attributes["rpc.grpc.status_code"] = code.value[0]
        if code in _FAULTS:
            self._error = f"{code.name}: {error}"[:MAX_ERROR_CHARACTERS]

    def answered(self, code: int, route: str | None) -> None:
        """Record the status of an HTTP response, and its route."""
        self._attributes["http.response.status_code"] = code
        if route is not None:
            self._attributes["http.route"] = route
            self._name = f"POST {route}"
        if code >= 400:
            self._attributes["error.type"] = str(code)
        if code >= 500:
            self._error = f"HTTP {code}"

    @property
    def exemplar(self) -> str:
        """The trace id to attach to histogram observations; empty: the trace is not sampled."""
        return self.context.trace_id if self.context.sampled else ""

    def output(self) -> "OutputTrace":
        """Open one of the outputs that the call asks for."""
        return OutputTrace(self._tracer, self.context, "chat" if "/chat/" in self._name else "text_completion")


class OutputTrace:
    """One output, from the moment the handler takes it to its end.

    Attributes:
        context: its span.
        request: the parsed request; None: it could not be parsed.
        timing: client-visible times.
        finish: how it ended, if by itself.
    """

    __slots__ = (
        *("_began", "_events", "_operation", "_parent", "_submitted", "_tracer"),
        *("context", "finish", "model", "num_tokens", "request", "timing"),
    )

    def __init__(self, tracer: Tracer, parent: TraceContext, operation: str) -> None:
        self.context = parent.child() if parent.sampled else parent
        self.request: Request | None = None
        self.timing: Timing | None = None
        self.finish: Finish | None = None
        self.num_tokens = 0
        self.model = ""
        self._tracer, self._parent, self._operation = tracer, parent, operation
        self._began = time.monotonic()
        self._submitted: float | None = None
        self._events: list[SpanEvent] = []

    def submitted(self, shard: str, *, resumed: bool) -> None:
        """Record that it, or the rest of it, is submitted to a scheduler."""
        now = time.monotonic()
        if self._submitted is None:
            self._submitted = now
        name = "resumed" if resumed else "submitted"
        self._events.append(SpanEvent(name, self._tracer.unix_ns(now), {"lorrery.shard": shard}))

    def shard_lost(self) -> None:
        """Record that its scheduler's stream has broken."""
        self._events.append(SpanEvent("shard_lost", self._tracer.unix_ns(time.monotonic()), {}))

    def ended(self, outcome: str, error: BaseException | None) -> None:
        """Make its spans."""
        if not self.context.sampled:
            return
        tracer, now = self._tracer, time.monotonic()
        attributes = self._attributes(outcome)
        why = None
        if isinstance(error, RequestError):
            attributes["error.type"] = error.reason.name
            why = f"{error.reason.name}: {error}"[:MAX_ERROR_CHARACTERS]
        elif isinstance(error, Exception):
            why = "INTERNAL"
        begin_ns, end_ns = tracer.unix_ns(self._began), tracer.unix_ns(now)
        admitted_ns = end_ns if self._submitted is None else tracer.unix_ns(self._submitted)
        tracer.end(Span("admission", self.context.child(), self.context, begin_ns, admitted_ns))
        if self.timing is not None and self.timing.first is not None:
            first_ns = tracer.unix_ns(self.timing.first)
            tokens = {"gen_ai.usage.output_tokens": self.num_tokens}
            tracer.end(Span("stream", self.context.child(), self.context, first_ns, end_ns, tokens))
        tracer.end(
            Span(
                "llm_request", self.context, self._parent, begin_ns, end_ns, attributes, events=self._events, error=why
            )
        )

    def _attributes(self, outcome: str) -> dict[str, Value]:
        said: dict[str, Value] = {
            "gen_ai.provider.name": "lorrery",
            "gen_ai.operation.name": self._operation,
            "lorrery.outcome": outcome,
        }
        if self.request is not None:
            said |= _asked(self.request, self.model)
        if self.timing is not None:
            said |= self.timing.latencies()
            said["gen_ai.usage.output_tokens"] = said["gen_ai.usage.completion_tokens"] = self.num_tokens
        if self.finish is not None:
            said |= _consumed(self.finish)
        return said


def _asked(request: Request, model: str) -> dict[str, Value]:
    sampling = request.sampling
    return {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.model": request.adapter_id or model,
        "gen_ai.response.model": request.adapter_id or model,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "lorrery.adapter": request.adapter_id,
        "lorrery.tenant": request.tenant_id,
    }


def _consumed(finish: Finish) -> dict[str, Value]:
    usage = finish.usage
    return {
        "gen_ai.response.finish_reasons": (finish.reason.word,),
        # vLLM's queue time is from arrival to admission, whatever the reason for the wait.
        "gen_ai.latency.time_in_queue": usage.queue_seconds + usage.adapter_load_seconds,
        "gen_ai.latency.time_in_model_prefill": usage.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": usage.decode_seconds,
        "gen_ai.latency.time_in_model_inference": usage.prefill_seconds + usage.decode_seconds,
        "lorrery.adapter_load_seconds": usage.adapter_load_seconds,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "lorrery.cached_tokens": usage.cached_tokens,
        "lorrery.worker": usage.worker_id,
        "lorrery.num_requeues": usage.num_requeues,
    }
