"""The Prometheus endpoint of a process, and the metrics that every process has.

Each process has its own registry, passed to whatever counts; prometheus_client's global registry is not used, so that
two services in one test do not collide.

A client has `REQUEST_SECONDS` for each part of its request, and the oldest of `MAX_CONNECTIONS` connections is closed
for a new one. So clients that connect and send nothing hold few threads, none for ever, and keep no scraper out.
"""

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Collection
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from io import BufferedIOBase
from socketserver import TCPServer
from typing import cast
from urllib.parse import parse_qs

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    MetricsHandler,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from lorrery.service.errors import LorreryError
from lorrery.service.installed import VERSION
from lorrery.service.telemetry.series import Exporter, Registry, Series, table
from lorrery.service.web.hosts import Hosts

BUILD_INFO = Series("lorrery_build_info", "1", "Version of the running process; always 1.", ("service", "version"))
SERVICE_STATE = Series(
    "lorrery_service_state",
    "1 or 0",
    "1 for the current state of the process, else 0.",
    ("state",),
    more="`starting`, `ready`, `draining`.",
)
# The following are the client library's own.
CPU = Series("process_cpu_seconds_total", "CPU seconds", "Total user and system CPU time spent in seconds.")
RESIDENT = Series("process_resident_memory_bytes", "bytes", "Resident memory size in bytes.")
VIRTUAL = Series("process_virtual_memory_bytes", "bytes", "Virtual memory size in bytes.")
STARTED = Series("process_start_time_seconds", "Unix seconds", "Start time of the process since unix epoch in seconds.")
OPEN_FILES = Series("process_open_fds", "files", "Number of open file descriptors.")
MAX_FILES = Series("process_max_fds", "files", "Maximum number of open file descriptors.")
PYTHON = Series(
    "python_info",
    "1",
    "Python platform information",
    ("implementation", "version", "major", "minor", "patchlevel"),
)
GC_COLLECTED = Series("python_gc_objects_collected_total", "objects", "Objects collected during gc", ("generation",))
GC_UNCOLLECTABLE = Series(
    "python_gc_objects_uncollectable_total", "objects", "Uncollectable objects found during GC", ("generation",)
)
GC_COLLECTIONS = Series(
    "python_gc_collections_total", "collections", "Number of times this generation was collected", ("generation",)
)

TABLE = table(globals())
"""Series that every process shows."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("starting", "ready", "draining")
REQUEST_SECONDS = 10.0
"""How long a client may send nothing of its request, or take nothing of the response, before it is closed."""
MAX_CONNECTIONS = 32
"""Concurrent connections, each with a thread; a scrape takes some 10 ms."""
MAX_HEAD_BYTES = 1 << 16
_WAKE_SECONDS = 1.0
"""How long the serving thread may take to notice that it should end."""
_RETRY_SECONDS = 0.5
"""Delay before accepting again after a connection could not be accepted for lack of a file descriptor."""


def new_registry(service: str) -> Registry:
    """Return a registry with the metrics of every process: process, platform, garbage collector, build."""
    # Drops the creation time beside every counter, which none of our dashboards uses.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = Registry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    Exporter(registry, [BUILD_INFO]).numbers(BUILD_INFO).labels(service, VERSION).set(1)
    return registry


def expose(shown: Collector, accept: str) -> tuple[str, bytes]:
    """Return content type and text of all series.

    Args:
        shown: a registry.
        accept: Accept header; without OpenMetrics in it, the older text format is used.
    """
    if "application/openmetrics-text" not in accept:
        return TEXT, generate_latest(shown)
    # Without `escaping`, the library (0.26) writes the colon of `vllm:` in names as an underscore.
    text: bytes = openmetrics.generate_latest(shown, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
    return OPENMETRICS, text


class ServiceState:
    """`lorrery_service_state`: the state of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._states = Exporter(registry, [SERVICE_STATE]).numbers(SERVICE_STATE)
        self.set("starting")

    def set(self, state: str) -> None:
        """Enter `state`, one of `STATES`."""
        assert state in STATES
        for name in STATES:
            self._states.labels(name).set(name == state)


class MetricsServer:
    """Serves `GET /metrics` in a thread of its own until closed; the thread is idle between requests."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self.port: int = server.server_port
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="metrics endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._closing = True
        host, port = self._server.server_address[:2]
        # Not `serve_forever` and `shutdown`: polling ten times a second costs a worker as much as seven decode steps.
        with contextlib.suppress(OSError), socket.create_connection((str(host), int(port)), _WAKE_SECONDS):
            pass
        self._thread.join(_WAKE_SECONDS)
        self._server.server_close()

    def _serve(self) -> None:
        while not self._closing:
            self._server.handle_request()


def address_error(setting: str, address: str, error: OSError) -> LorreryError:
    """Return the error for an address that cannot be bound; `setting` is its origin."""
    cure = ""
    if error.errno == errno.EADDRINUSE:
        cure = "; give another port, or 0 for a free one (`lorrery up --free-ports` for all, `lorrery serve --port 0`)"
    return LorreryError(f"{setting}: address {address} cannot be taken: {error.strerror or error}{cure}")


def serve_metrics(
    address: str, registry: CollectorRegistry, setting: str, allowed_hosts: Collection[str] = ()
) -> MetricsServer:
    """Serve `registry` on `http://address/metrics`.

    Args:
        address: HOST:PORT; port 0 takes a free one, returned as `.port`.
        registry: what to show.
        setting: origin of `address`, for messages.
        allowed_hosts: see `service.network.hosts`.

    Raises:
        LorreryError: the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    try:
        family = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][0]
        server = _Server(family, (host.strip("[]"), int(port)), _handler(registry, Hosts(address, allowed_hosts)))
    except OSError as error:
        raise address_error(setting, address, error) from None
    return MetricsServer(server)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    """Connections that the kernel queues until they are accepted; the default is 5."""

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int], handler: type[MetricsHandler]) -> None:
        self.address_family = family
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._changing = threading.Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_RETRY_SECONDS)  # the connection is still queued, and would be tried again at once
            raise

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        with self._changing:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # it has gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        with self._changing:
            self._open.pop(request, None)
            super().shutdown_request(request)

    def server_bind(self) -> None:
        # HTTPServer's own resolves the host's full name, which can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        # A scraper that timed out while the process was busy; it counts that itself.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Head:
    """Reads the lines of a request's head; http.server allows a hundred of 64 KiB.

    Args:
        lines: of the connection, which has one request.
    """

    def __init__(self, lines: BufferedIOBase) -> None:
        self._lines, self._bytes_left = lines, MAX_HEAD_BYTES
        self.close = lines.close

    def readline(self, limit: int) -> bytes:
        """Return the next line; if the head is too long, one that http.server refuses for its length."""
        line = self._lines.readline(min(limit, self._bytes_left + 1))
        self._bytes_left -= len(line)
        return line if self._bytes_left >= 0 else bytes(limit)


def _handler(registry: CollectorRegistry, hosts: Hosts) -> type[MetricsHandler]:
    # Each thread that writes takes as many turns from the service as the service has.
    one_writes = threading.Lock()

    class Handler(MetricsHandler):
        timeout = REQUEST_SECONDS

        def setup(self) -> None:
            super().setup()
            self.rfile = cast("BufferedIOBase", _Head(self.rfile))

        def do_GET(self) -> None:  # noqa: N802  http.server's name for it
            path, _, query = self.path.partition("?")
            refusal = hosts.refusal(self.headers.get("Host") or "", self.headers.get("Origin") or "")
            if refusal is not None:
                self._send(refusal[0], TEXT, f"{refusal[1]}\n".encode())
            elif path != "/metrics":
                self.send_error(404, "only /metrics is here")
            else:
                names = parse_qs(query).get("name[]")
                with one_writes:
                    shown = registry if names is None else registry.restricted_registry(names)
                    content_type, text = expose(shown, self.headers.get("Accept") or "")
                self._send(HTTPStatus.OK, content_type, text)

        def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
            # Not compressed: compressing a hundred kilobytes would take as long as writing them.
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    Handler.registry = registry
    return Handler
