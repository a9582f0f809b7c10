"""What this writes for Prometheus is what the client library would."""

import re
import socket
import struct
import threading
import urllib.request

import numpy as np
import pytest
from prometheus_client import Gauge, generate_latest
from prometheus_client.openmetrics import exposition, parser

from lorrery.service.telemetry.exposition import OPENMETRICS, TEXT, Registry, expose
from lorrery.service.telemetry.metrics import ServiceState, new_registry, serve_metrics
from lorrery.service.telemetry.series import Exporter, Series

REQUESTS = Series("x_requests_total", "requests", 'Back\\slash and "quotes".', ("adapter", "outcome"))
OPEN = Series("x_open_requests", "requests", "Requests that are open.")
WAIT = Series("x_wait_seconds", "device seconds", "How long they wait.", ("kind",), (0.1, 1.0))
HOSTILE = ["plain", 'q"uote', "back\\slash", "new\nline", "ünï", "{}=,", ""]


def written(text: bytes) -> bytes:
    """Numbers without the `.0` of the library's."""
    return re.sub(rb"\.0$", b"", text, flags=re.MULTILINE)


def filled(registry: Registry) -> Exporter:
    exporter = Exporter(registry, [REQUESTS, OPEN, WAIT], {"worker": "w"})
    requests, wait = exporter.numbers(REQUESTS), exporter.histograms(WAIT)
    exporter.value(OPEN, lambda: 3)
    for number, name in enumerate(HOSTILE):
        requests.labels(name, "ok").inc(number + 0.5)
        wait.labels(name).observe_many(number / 10, 4)
    Gauge("other_gauge", "Of the library's own kind.", registry=registry).set(7)
    return exporter


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_text_is_the_library_s(registry: Registry):
    filled(registry)
    for _ in range(2):  # what is kept from the first is right in the second
        content_type, text = expose(registry, "text/plain")
        assert content_type == TEXT
        assert written(text) == written(generate_latest(registry))


def test_openmetrics_is_the_library_s(registry: Registry):
    filled(registry)
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3"
    content_type, text = expose(registry, accept)
    assert content_type == OPENMETRICS
    assert written(text) == written(exposition.generate_latest(registry))


def test_an_exemplar_is_shown_with_its_bucket_in_openmetrics_alone(registry: Registry):
    exporter = Exporter(registry, [WAIT])
    wait = exporter.histograms(WAIT).labels("a")
    wait.observe(0.5)
    wait.exemplify(0.5, "4bf92f3577b34da6a3ce929d0e0e4736")
    text = expose(registry, "application/openmetrics-text")[1].decode()
    (family,) = parser.text_string_to_metric_families(text)
    found = {sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar}
    assert list(found) == ["1.0"]
    exemplar = found["1.0"]
    assert exemplar is not None
    assert (exemplar.labels, exemplar.value) == ({"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}, 0.5)
    assert b"trace_id" not in expose(registry, "")[1]


def test_numbers_of_any_size_are_read_back(registry: Registry):
    exporter = Exporter(registry, [OPEN])
    number = exporter.number(OPEN)
    for value in (0, True, np.int64(7), np.float64(0.1), 1e-9, 123456789.25, 1e22, float("inf"), -1):
        number.set(value)
        (family,) = parser.text_string_to_metric_families(expose(registry, "application/openmetrics-text")[1].decode())
        assert family.samples[0].value == value


def test_endpoint_answers_in_whole_and_by_name():
    registry = new_registry("test")
    ServiceState(registry)
    server = serve_metrics("127.0.0.1:0", registry, "x.metrics")
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})) as response:
            assert response.headers["Content-Type"] == TEXT
            assert b'lorrery_service_state{state="starting"} 1\n' in response.read()
        with urllib.request.urlopen(f"{url}?name[]=lorrery_build_info") as response:
            body = response.read()
        assert b"lorrery_build_info" in body
        assert b"lorrery_service_state" not in body
    finally:
        server.close()


def test_scraper_that_hangs_up_before_the_answer_leaves_nothing_in_the_log(
    registry: Registry, capfd: pytest.CaptureFixture[str]
):
    asked: list[threading.Thread] = []
    is_asked, hung_up = threading.Event(), threading.Event()

    def num_open() -> float:
        asked.append(threading.current_thread())
        is_asked.set()
        hung_up.wait(60)
        return 3

    Exporter(registry, [OPEN]).value(OPEN, num_open)
    server = serve_metrics("127.0.0.1:0", registry, "x.metrics")
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as scraper:
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
            scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert is_asked.wait(60)
        hung_up.set()
        asked[0].join(10)
    finally:
        server.close()
    assert capfd.readouterr().err == ""
