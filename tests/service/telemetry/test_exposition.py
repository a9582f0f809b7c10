"""What a scrape of a process shows, in both formats."""

import socket
import struct
import threading
import urllib.request

import numpy as np
import pytest
from prometheus_client.openmetrics import parser

from lorrery.service.telemetry.metrics import TEXT, ServiceState, expose, new_registry, serve_metrics
from lorrery.service.telemetry.series import Exporter, Registry, Series

REQUESTS = Series("x_requests_total", "requests", 'Back\\slash and "quotes".', ("adapter", "outcome"))
OPEN = Series("x_open_requests", "requests", "Requests that are open.")
WAIT = Series("x_wait_seconds", "device seconds", "How long they wait.", ("kind",), (0.1, 1.0))
ENGINE = Series("vllm:num_requests_running", "requests", "Requests in batches.")
HOSTILE = ["plain", 'q"uote', "back\\slash", "new\nline", "ünï", "{}=,", ""]


def scraped(registry: Registry, accept: str) -> bytes:
    return expose(registry, accept)[1]


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_hostile_labels_are_read_back(registry: Registry):
    exporter = Exporter(registry, [REQUESTS, WAIT], {"worker": "w"})
    requests, wait = exporter.numbers(REQUESTS), exporter.histograms(WAIT)
    for number, name in enumerate(HOSTILE):
        requests.labels(name, "ok").inc(number + 0.5)
        wait.labels(name).observe_many(number / 10, 4)
    for _ in range(2):
        counted, waited = parser.text_string_to_metric_families(
            scraped(registry, "application/openmetrics-text").decode()
        )
        assert [sample.labels["adapter"] for sample in counted.samples] == HOSTILE
        assert [sample.value for sample in counted.samples] == [number + 0.5 for number in range(len(HOSTILE))]
        assert {sample.labels["kind"] for sample in waited.samples} == {*HOSTILE}
        assert {sample.labels["worker"] for sample in waited.samples} == {"w"}


def test_exporters_of_the_same_series_are_shown_as_one(registry: Registry):
    for worker in ("a", "b"):
        Exporter(registry, [OPEN], {"worker": worker}).number(OPEN).set(3)
    (family,) = parser.text_string_to_metric_families(scraped(registry, "application/openmetrics-text").decode())
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"worker": "a"}, 3), ({"worker": "b"}, 3)]


def test_names_keep_their_colon_in_both_formats(registry: Registry):
    Exporter(registry, [ENGINE]).number(ENGINE).set(3)
    for accept in ("", "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"):
        assert b"\nvllm:num_requests_running 3.0\n" in scraped(registry, accept)


def test_an_exemplar_is_shown_with_its_bucket_in_openmetrics_alone(registry: Registry):
    exporter = Exporter(registry, [WAIT])
    wait = exporter.histograms(WAIT).labels("a")
    wait.observe(0.5)
    wait.exemplify(0.5, "4bf92f3577b34da6a3ce929d0e0e4736")
    text = scraped(registry, "application/openmetrics-text").decode()
    (family,) = parser.text_string_to_metric_families(text)
    found = {sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar}
    assert list(found) == ["1.0"]
    exemplar = found["1.0"]
    assert exemplar is not None
    assert (exemplar.labels, exemplar.value) == ({"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}, 0.5)
    assert b"trace_id" not in scraped(registry, "")


def test_numbers_of_any_size_are_read_back(registry: Registry):
    exporter = Exporter(registry, [OPEN])
    number = exporter.number(OPEN)
    for value in (0, True, np.int64(7), np.float64(0.1), 1e-9, 123456789.25, 1e22, float("inf"), -1):
        number.set(value)
        (family,) = parser.text_string_to_metric_families(scraped(registry, "application/openmetrics-text").decode())
        assert family.samples[0].value == value


def test_endpoint_answers_in_whole_and_by_name():
    registry = new_registry("test")
    ServiceState(registry)
    server = serve_metrics("127.0.0.1:0", registry, "x.metrics")
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})) as response:
            assert response.headers["Content-Type"] == TEXT
            assert b'lorrery_service_state{state="starting"} 1.0\n' in response.read()
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
