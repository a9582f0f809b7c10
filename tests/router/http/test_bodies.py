"""Bodies that are JSON to some readers only, or cost too much to read."""

import json
import random
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from lorrery.router.http.bodies import parse
from lorrery.router.http.nesting import MAX_LEVELS, too_deep


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


def test_levels_are_counted_outside_strings_only() -> None:
    def levels(value: Any) -> int:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inside is None else 1 + max(map(levels, inside), default=0)

    def drawn(rng: random.Random, depth: int) -> Any:
        if not depth or (kind := rng.randrange(5)) < 2:
            return "".join(rng.choices('[]{}"\\\n aé', k=rng.randrange(6)))
        inside = [drawn(rng, depth - 1) for _ in range(rng.randrange(3))]
        return inside if kind < 4 else {str(drawn(rng, 0)): one for one in inside}

    rng = random.Random(5)
    for _ in range(2000):
        value = drawn(rng, 4)
        deeper = MAX_LEVELS - levels(value)
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, separators=(",", ":"))):
            assert too_deep(f"{'[' * deeper}{text}{']' * deeper}".encode()) is None
            why = too_deep(f"{'[' * (deeper + 1)}{text}{']' * (deeper + 1)}".encode())
            assert why == "is nested 65 levels deep; at most 64 are read; send fewer levels"
