"""An OTLP collector in the test's own process: takes spans over gRPC and HTTP, and lays them out as trees."""

import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1 import common_pb2


@dataclass(eq=False)
class Got:
    """A span that has come."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    error: str | None
    kind: int
    state: str
    children: list["Got"] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def walk(self) -> Iterator["Got"]:
        yield self
        for child in self.children:
            yield from child.walk()

    def all(self, name: str) -> list["Got"]:
        return [span for span in self.walk() if span.name == name]

    def one(self, name: str) -> "Got":
        (found,) = self.all(name)
        return found

    def drawn(self, from_ns: int | None = None, depth: int = 0) -> str:
        """Return the tree as text, with times in milliseconds."""
        from_ns = self.begin_ns if from_ns is None else from_ns
        at, took = (self.begin_ns - from_ns) / 1e6, (self.end_ns - self.begin_ns) / 1e6
        line = f"{'  ' * depth + self.name:<48} {self.service:<18} {at:9.1f} {took:9.1f}  {self.error or ''}".rstrip()
        return "\n".join([line, *(child.drawn(from_ns, depth + 1) for child in self.children)])


class Collector:
    """Listens on free ports; `with`.

    Attributes:
        spans: all that have come, in order.
        headers: of every call that brought some.
    """

    def __init__(self) -> None:
        self.spans: list[Got] = []
        self.headers: list[dict[str, str]] = []
        self._came = threading.Lock()
        self._grpc = grpc.server(futures.ThreadPoolExecutor(4))
        pb_grpc.add_TraceServiceServicer_to_server(_Servicer(self), self._grpc)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True, args=(0.05,))
        self.grpc_endpoint = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self.http_endpoint = f"http://127.0.0.1:{self._http.server_port}/v1/traces"

    def __enter__(self) -> Self:
        self._grpc.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._grpc.stop(0).wait()
        self._http.shutdown()
        self._http.server_close()

    def take(self, request: pb.ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        with self._came:
            self.headers.append(headers)
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_got(span, service) for span in scope.spans]

    def tree(self, trace_id: str) -> Got | None:
        """Return the span of a trace that all others are below, as far as they have come; None: there is none."""
        with self._came:
            spans = [span for span in self.spans if span.trace_id == trace_id]
        known = {span.span_id for span in spans}
        for span in spans:
            below = (one for one in spans if one.parent_id == span.span_id)
            span.children = sorted(below, key=lambda one: (one.begin_ns, one.end_ns))
        roots = [span for span in spans if span.parent_id not in known]
        return roots[0] if len(roots) == 1 else None


class _Servicer(pb_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request, context):  # noqa: N802  gRPC's name for it
        self._collector.take(request, dict(context.invocation_metadata()))
        return pb.ExportTraceServiceResponse()


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            collector.take(pb.ExportTraceServiceRequest.FromString(body), headers)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    return Handler


def _got(span: Any, service: str) -> Got:
    return Got(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=[(event.name, _values(event.attributes)) for event in span.events],
        error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
        kind=span.kind,
        state=span.trace_state,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
