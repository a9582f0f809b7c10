"""Calls of tools in growing text: however it is cut, the calls are the same."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.router.edges.tools import CallReader, read_whole

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.text(min_size=1), st.dictionaries(st.text(max_size=4), JSON, max_size=3)), min_size=1, max_size=3
)
CUTS = st.lists(st.floats(0, 1), max_size=12)


def written(calls: list[tuple[str, object]], indent: int | None = None) -> str:
    return json.dumps([{"name": name, "parameters": given} for name, given in calls], ensure_ascii=False, indent=indent)


def read(text: str, cuts: list[float], tool: str | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls of an output that comes in pieces."""
    reader = CallReader(tool)
    places = sorted(int(cut * len(text)) for cut in (0, *cuts, 1))
    pieces = [piece for first, last in pairwise(places) for piece in reader.push(text[first:last])] + reader.end()
    said, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if piece.call is None:
            said += piece.text
        elif piece.name is not None:
            assert piece.call == len(calls)
            calls.append((piece.name, piece.text))
        else:
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    assert reader.num_calls == len(calls)
    return said, calls


@given(calls=CALLS, cuts=CUTS, indent=st.sampled_from([None, 0, 2]))
def test_calls_are_read_however_the_text_is_cut(
    calls: list[tuple[str, object]], cuts: list[float], indent: int | None
) -> None:
    said, found = read(written(calls, indent), cuts)
    assert said == ""
    assert [(name, json.loads(given)) for name, given in found] == calls


@given(calls=CALLS, cuts=CUTS, end=st.floats(0, 1))
def test_an_output_cut_off_has_the_beginning_of_its_calls(
    calls: list[tuple[str, object]], cuts: list[float], end: float
) -> None:
    text = written(calls)
    _, whole = read(text, [])
    said, found = read(text[: int(end * len(text))], cuts)
    assert said == ""
    assert [name for name, _ in found] == [name for name, _ in whole][: len(found)]
    assert [given for _, given in found[:-1]] == [given for _, given in whole][: max(0, len(found) - 1)]
    assert all(one[1].startswith(other[1]) for one, other in zip(whole, found, strict=False))


@given(text=st.text().filter(lambda text: not text.lstrip().startswith("[")), cuts=CUTS)
def test_other_text_is_text(text: str, cuts: list[float]) -> None:
    assert read(text, cuts) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[{]",
        '[{"na ',
        '[ {"names": 1}]',
        '[{"name": 3',
        '[{"name": 3}]',
        "[]",
        '[{"name": "a\\q", "parameters": {}}]',
        '[{"name": "a\\u12", "parameters": {}}]',
        '[{"name": "a\n", "parameters": {}}]',
        '[{"name": "a", "parameters": "x"}]',
        '[{"name": "a", "parameters": null}]',
        f'[{{"name": "{"x" * 5000}',
    ],
)
def test_what_never_becomes_a_call_is_text(text: str) -> None:
    assert read(text, [0.3, 0.6]) == (text, [])


@given(cuts=CUTS, end=st.floats(0, 1))
def test_what_ends_before_it_is_a_call_is_left_out(cuts: list[float], end: float) -> None:
    text = '\n[ {"name" : "a\\u00e9\\"b" , "parameters" : '
    assert read(text[: 2 + int(end * len(text))], cuts) == ("", [])


@given(given=st.dictionaries(st.text(max_size=4), JSON), cuts=CUTS, blanks=st.sampled_from(["", " ", " \n"]))
def test_a_given_tool_has_the_whole_output(given: object, cuts: list[float], blanks: str) -> None:
    text = json.dumps(given)
    assert read(blanks + text, cuts, "look") == ("", [("look", text)])
    assert read_whole(CallReader("look"), blanks + text) == ("", [("look", text)])
