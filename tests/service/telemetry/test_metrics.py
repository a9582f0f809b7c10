"""The metrics endpoint beside clients that connect and send nothing, or not all of a request."""

import contextlib
import os
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from lorrery.service.telemetry import metrics
from lorrery.service.telemetry.metrics import MAX_CONNECTIONS, MetricsServer, new_registry, serve_metrics

PARTS = [b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nX-Half: "]


@pytest.fixture
def endpoint() -> Iterator[MetricsServer]:
    server = serve_metrics("127.0.0.1:0", new_registry("test"), "x.metrics")
    yield server
    server.close()


def _scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return response.read()


@pytest.mark.parametrize("part", PARTS)
def test_connection_whose_request_does_not_come_is_closed(part: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "REQUEST_SECONDS", 0.5)
    server = serve_metrics("127.0.0.1:0", new_registry("test"), "x.metrics")
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as idle:
            idle.sendall(part)
            assert idle.recv(100) == b""
    finally:
        server.close()


@pytest.mark.parametrize(("listen", "host"), [("[::1]:0", "[::1]"), ("[::]:0", "[::1]"), ("[::]:0", "127.0.0.1")])
def test_metrics_are_shown_on_ipv6(listen: str, host: str):
    server = serve_metrics(listen, new_registry("test"), "x.metrics")
    try:
        with urllib.request.urlopen(f"http://{host}:{server.port}/metrics", timeout=60) as response:
            assert b"python_info" in response.read()
    finally:
        server.close()


def test_more_connections_than_the_bound_close_the_oldest_and_keep_no_scraper_out(endpoint: MetricsServer):
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), timeout=60))
            for _ in range(3 * MAX_CONNECTIONS)
        ]
        assert b"lorrery_build_info" in _scrape(endpoint.port)
        for connection in idle[: 2 * MAX_CONNECTIONS]:
            assert connection.recv(100) == b""
        # A connection is closed before its thread ends: each that still runs is given the time, the newest go on.
        while len(running := set(threading.enumerate()) - before) > MAX_CONNECTIONS:
            for thread in running:
                thread.join(0.01)
        assert b"lorrery_build_info" in _scrape(endpoint.port)


def test_accepting_that_fails_is_tried_again_later(endpoint: MetricsServer, monkeypatch: pytest.MonkeyPatch):
    accept, failures = socket.socket.accept, []

    def fail_twice(listening: socket.socket) -> tuple[socket.socket, object]:
        if len(failures) < 2:
            failures.append(OSError(24, os.strerror(24)))
            raise failures[-1]
        return accept(listening)

    monkeypatch.setattr(metrics, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(socket.socket, "accept", fail_twice)
    assert b"lorrery_build_info" in _scrape(endpoint.port)
    assert len(failures) == 2
