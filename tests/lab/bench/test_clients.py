"""How the benchmark of streams counts."""

import pytest

from lab.bench.clients import Clients, Edges, Window
from lab.bench.mock_servers import PEERS, program_of
from lab.bench.streams import StreamCount, StreamEvents

ANSWER = b"HTTP/1.1 200 OK\r\n\r\n" + b"1f\r\ndata: {}\n\n\r\n" * 3 + b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_counted_wherever_the_network_cuts(size: int):
    count = StreamCount(1)
    stream = StreamEvents(b"", count)
    # The first read has the status line.
    for start in (0, *range(20, len(ANSWER), size)):
        stream.data_received(ANSWER[start : start + (20 if start == 0 else size)])
    assert (count.events, count.failure) == (4, "")


def test_an_error_is_a_failure_and_no_event():
    count = StreamCount(1)
    StreamEvents(b"", count).data_received(b'HTTP/1.1 404 Not Found\r\n\r\n{"error": 1}')
    assert count.failure.startswith("HTTP/1.1 404")


def test_ratios_are_medians_of_pairs():
    cheap, dear = Window(1.0, 90, 100, 0.5), Window(1.0, 90, 100, 1.0)
    assert Edges(64, [dear, dear, dear], [cheap, cheap, dear]).ratio == 0.5
    found = Clients([], {"Lorrery": [cheap, cheap], "other": [dear, dear]}, {})
    assert found.ratio("other") == 2


def test_what_is_not_installed_is_skipped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("DYNAMO_PYTHON", raising=False)
    assert [program_of(one) for one in PEERS] == [None, None, None]
