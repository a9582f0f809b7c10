"""The Prometheus endpoint of a process, and the metrics that every process has.

Each process has a registry of its own, handed to whoever counts something; the global one of prometheus_client is not
used, so that two services in one test do not meet.
"""

import errno
import threading
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from socketserver import TCPServer

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    MetricsHandler,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lorrery.chassis.errors import LorreryError
from lorrery.chassis.version import VERSION

STATES = ("starting", "ready", "draining")
_POLL_SECONDS = 0.1


def new_registry(service: str) -> CollectorRegistry:
    """Return a registry with what every process shows: process, platform, garbage collector, build."""
    # The start time beside every counter, which no dashboard of ours asks for.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    Gauge("lorrery_build_info", "Version that runs; always 1.", ["service", "version"], registry=registry).labels(
        service, VERSION
    ).set(1)
    return registry


def labelled(registry: CollectorRegistry, **labels: str) -> CollectorRegistry:
    """Return a registry whose metrics `registry` shows with these labels added, all of them and all their samples."""
    inner = CollectorRegistry()
    registry.register(_Labelled(inner, labels))
    return inner


class _Labelled(Collector):
    def __init__(self, inner: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._inner, self._labels = inner, labels

    def collect(self) -> Iterator[Metric]:
        for family in self._inner.collect():
            family.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in family.samples]
            yield family


class ServiceState:
    """`lorrery_service_state`: where the process is in its life."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "lorrery_service_state", "1 for the state that the process is in, else 0.", ["state"], registry=registry
        )
        self.set("starting")

    def set(self, state: str) -> None:
        """Enter `state`, one of `STATES`."""
        assert state in STATES
        for name in STATES:
            self._gauge.labels(name).set(name == state)


class MetricsServer:
    """Answers `GET /metrics` in a thread of its own until closed."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self.port: int = server.server_port
        self._thread = threading.Thread(
            target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics endpoint", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port; blocks for up to a tenth of a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def address_error(setting: str, address: str, error: OSError) -> LorreryError:
    """Return what to say of an address that cannot be taken; `setting` is where it comes from."""
    cure = ""
    if error.errno == errno.EADDRINUSE:
        cure = "; give another port, or 0 for a free one (`lorrery up --free-ports` does so for all of a cluster)"
    return LorreryError(f"{setting}: address {address} cannot be taken: {error.strerror or error}{cure}")


def serve_metrics(address: str, registry: CollectorRegistry, setting: str) -> MetricsServer:
    """Show `registry` on `http://address/metrics`.

    Args:
        address: HOST:PORT; port 0 takes a free one, which `.port` then tells.
        registry: what to show.
        setting: where `address` comes from, for the message.

    Raises:
        LorreryError: the address cannot be taken.
    """
    host, _, port = address.rpartition(":")
    try:
        server = _Server((host.strip("[]"), int(port)), _handler(registry))
    except OSError as error:
        raise address_error(setting, address, error) from None
    return MetricsServer(server)


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        # HTTPServer's own asks the resolver for the host's full name, which can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


def _handler(registry: CollectorRegistry) -> type[MetricsHandler]:
    class Handler(MetricsHandler):
        def do_GET(self) -> None:  # noqa: N802  http.server's name for it
            if self.path.partition("?")[0] == "/metrics":
                super().do_GET()
            else:
                self.send_error(404, "only /metrics is here")

    Handler.registry = registry
    return Handler
