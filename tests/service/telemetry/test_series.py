"""From a table of series to what Prometheus reads."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lorrery.service.telemetry import series as throughput
from lorrery.service.telemetry.series import Exporter, Series, Throughput

REQUESTS = Series("x_requests_total", "requests", "Requests that ended.", ("outcome",))
OPEN = Series("x_open_requests", "requests", "Requests that are open.")
WAIT = Series("x_wait_seconds", "device seconds", "How long they wait.", ("kind",), (0.1, 1.0))


def test_series_are_shown_in_the_order_of_the_table_with_their_help_type_and_labels():
    registry = CollectorRegistry()
    exporter = Exporter(registry, [REQUESTS, OPEN, WAIT], {"worker": "w"})
    wait = exporter.histograms(WAIT)
    exporter.value(OPEN, lambda: 3)
    requests = exporter.numbers(REQUESTS, "ok", "failed")
    requests.labels("ok").inc(2)
    wait.labels("a").observe_many(0.5, 4)
    assert generate_latest(registry).decode().splitlines() == [
        "# HELP x_requests_total Requests that ended.",
        "# TYPE x_requests_total counter",
        'x_requests_total{outcome="ok",worker="w"} 2.0',
        'x_requests_total{outcome="failed",worker="w"} 0.0',
        "# HELP x_open_requests Requests that are open.",
        "# TYPE x_open_requests gauge",
        'x_open_requests{worker="w"} 3.0',
        "# HELP x_wait_seconds How long they wait.",
        "# TYPE x_wait_seconds histogram",
        'x_wait_seconds_bucket{kind="a",le="0.1",worker="w"} 0.0',
        'x_wait_seconds_bucket{kind="a",le="1.0",worker="w"} 4.0',
        'x_wait_seconds_bucket{kind="a",le="+Inf",worker="w"} 4.0',
        'x_wait_seconds_count{kind="a",worker="w"} 4.0',
        'x_wait_seconds_sum{kind="a",worker="w"} 2.0',
    ]


def test_series_that_is_not_in_the_table_cannot_be_shown():
    exporter = Exporter(CollectorRegistry(), [REQUESTS])
    with pytest.raises(AssertionError, match="x_open_requests is not in the table"):
        exporter.number(OPEN)


def test_a_rate_is_over_the_time_since_it_was_asked_for_a_second_at_least(monkeypatch: pytest.MonkeyPatch):
    now, done = 100.0, 5
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: now))
    rate = Throughput(lambda: done)
    assert rate.per_second() == 0
    now, done = 102.0, 25
    assert rate.per_second() == 10
    now, done = 102.5, 1000
    assert rate.per_second() == 10  # another scraper, right behind the first
    now = 106.0
    assert rate.per_second() == 975 / 4
    now = 107.0
    assert rate.per_second() == 0
