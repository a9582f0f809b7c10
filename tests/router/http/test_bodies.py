"""Bodies that are JSON to some readers only, or cost too much to read."""

import json

import pytest
from starlette.exceptions import HTTPException

from lorrery.router.http.bodies import parse


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON: Expecting property name"),
        (b'{"a": 1} x', "Extra data, at character 9"),
        (b'{"a": "\xff"}', "no UTF-8 text: byte 0xff at 7"),
        (b"\xef\xbb\xbf{}", "no JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b' twice"),
        (b"[" * 100_000, "the body is nested 100000 levels deep; at most 64 are read; send fewer levels"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested 65 levels deep"),
        (b"[[], " + b'[{"a": ' * 33, "nested 67 levels deep"),
        (b"[" + b"9" * 5000 + b"]", "too many digits"),
    ],
)
def test_what_is_no_plain_json_is_refused_with_the_reason(body: bytes, why: str) -> None:
    with pytest.raises(HTTPException, match=why) as caught:
        parse(body)
    assert caught.value.status_code == 400
    assert len(caught.value.detail) < 200


def test_what_is_json_is_read() -> None:
    content = {"a": [1, 2.5, -1e300, None, True, {"b": "\u00e9\U0001f600"}], "": {}}
    assert parse(b"[" * 64 + b"]" * 64) == json.loads("[" * 64 + "]" * 64)
    brackets = {'["\\': ["[" * 100, "\\" + "{" * 100, '"[' * 100], "{": {}}
    assert parse(json.dumps(brackets).encode()) == brackets
    assert parse(json.dumps(content).encode()) == parse(json.dumps(content, ensure_ascii=False).encode()) == content
