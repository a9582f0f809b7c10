from types import SimpleNamespace

import pytest

from lorrery.service.telemetry import throughput
from lorrery.service.telemetry.throughput import Throughput


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
