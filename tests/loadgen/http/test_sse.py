import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.loadgen.http.answer import MOST_EVENT_BYTES, EventStream


def by_the_standard(stream):
    """HTML, 9.2.6, word for word: lines, then fields, then dispatch at an empty line."""
    stream = stream.removeprefix(b"\xef\xbb\xbf")
    lines = re.split(rb"\r\n|\n|\r", stream)[:-1]  # the last line has not ended
    found, data = [], []
    for line in lines:
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
            continue
        name, colon, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" ") if colon else b"")
    return found


def in_pieces(stream, cuts):
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


FIELDS = [b"data: x", b"data:y", b"data", b"data:", b": c", b"id: 1", b"z", b" "]
tokens = st.sampled_from([*FIELDS, b"\n", b"\r\n", b"\r"])


@given(st.booleans(), st.lists(tokens, max_size=30).map(b"".join), st.lists(st.integers(0, 200), max_size=8))
def test_events_are_the_standards_however_the_bytes_are_cut(with_mark, stream, cuts):
    stream = (b"\xef\xbb\xbf" if with_mark else b"") + stream
    events = EventStream()
    assert [data for piece in in_pieces(stream, cuts) for data in events.feed(piece)] == by_the_standard(stream)


def test_nothing_between_a_cr_and_its_lf_is_no_line_end():
    events = EventStream()
    assert [events.feed(piece) for piece in (b"data: 1\r", b"", b"\n", b"\r\n")] == [[], [], [], [b"1"]]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_is_there_with_its_last_byte(end):
    events = EventStream()
    assert events.feed(b"data: 1" + end) == []
    assert events.feed(end) == [b"1"]
    assert events.feed(b"data:2" + end + end) == [b"2"]


def test_an_event_without_an_end_is_given_up():
    events = EventStream()
    assert events.feed(b"data: " + b"x" * MOST_EVENT_BYTES) == []
    with pytest.raises(ValueError, match="an event of over 16,777,216 bytes"):
        events.feed(b"x")
