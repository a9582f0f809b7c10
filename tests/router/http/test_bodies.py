"""Bodies that are no JSON, that some readers take for JSON only, or that cost too much to read."""

import json
import random
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from lorrery.router.http.bodies import MAX_LEVELS, BodyReader, Bounds, too_much
from lorrery.service.tasks import Turns
from tests.router.http.conftest import StartHttp, refusal

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
BOUNDS = Bounds.of(2048, 1024)
BEHIND_QUOTES = '{"\u2222": ' + "[" * 65 + "]" * 65 + ', "\u2222": 1}'
"""In UTF-16 the bytes of its keys are quotation marks, between which there are no brackets to count."""


async def parse(body: bytes) -> object:
    found = await BodyReader(BOUNDS, Turns()).read(body)
    if isinstance(found, Exception):
        raise found
    return found


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"a": "\xff"}', "can't decode byte 0xff"),
        (b"[" + b"9" * 5000 + b"]", "Exceeds the limit"),
    ],
)
async def test_what_is_no_json_is_refused_with_the_reason(body: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        await parse(body)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("[" * 100_000, 100_000),
        ('{"a":' * 65 + "1" + "}" * 65, 65),
        ("[[], " + '[{"a": ' * 33, 67),
        (BEHIND_QUOTES, 66),
    ],
)
@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_what_is_nested_too_deeply_is_refused_in_every_encoding(text: str, levels: int, encoding: str) -> None:
    with pytest.raises(HTTPException, match=f"^400: the body is nested {levels} levels deep; at most 64 are read"):
        await parse(text.encode(encoding))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('["a",' * 11_000, "the body is nested"),
        ("[" + "{}," * 30_000, "the body has over 20480 texts, objects and arrays"),
        ("[" + '"a",' * 30_000, "the body has over 20480 texts, objects and arrays"),
        ("[" + "1," * 300_000, "the body has over 264192 values"),
        ("[" + "1" * 300_000 + "]", "a number has 300000 digits; at most 400 are read"),
    ],
)
@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_more_than_a_valid_request_can_hold_is_refused(text: str, why: str, encoding: str) -> None:
    with pytest.raises((HTTPException, ValueError), match=why):
        await parse(text.encode(encoding))


@pytest.mark.parametrize("text", ["\\", '"', '\\"', "x\\", "\\\\x"])
async def test_escapes_across_pieces_are_counted_right(text: str) -> None:
    body = [text * 200_000 + "[" * 100_000, [1] * 200_000, "," * 500_000]
    assert await parse(json.dumps(body).encode()) == body


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_what_is_json_is_read_as_vllm_reads_it(encoding: str) -> None:
    content = {"a": [1, 2.5, -1e300, None, True, {"b": "\u00e9\U0001f600"}], "": {}}
    for ensure_ascii in (True, False):
        assert await parse(json.dumps(content, ensure_ascii=ensure_ascii).encode(encoding)) == content
    brackets = {'["\\': ["[" * 100, "\\" + "{" * 100, '"[' * 100], "{": {}}
    assert await parse(json.dumps(brackets).encode(encoding)) == brackets
    assert await parse(("[" * 64 + "]" * 64).encode(encoding)) == json.loads("[" * 64 + "]" * 64)
    assert await parse('{"a": 1, "a": 2}'.encode(encoding)) == {"a": 2}
    assert str(await parse("[NaN, -Infinity]".encode(encoding))) == "[nan, -inf]"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"tokens": [}', "body.12: JSON decode error: Expecting value"),
        (b'{"tokens": "\xff"}', "There was an error parsing the body"),
        (b'{"tokens": ' + b"9" * 5000 + b"}", "There was an error parsing the body"),
    ],
)
async def test_a_client_hears_why(start_http: StartHttp, body: bytes, message: str) -> None:
    router = await start_http()
    async with router.connection() as connection:
        status, error = await refusal(connection, "/detokenize", body)
    assert (status, error.get("message", error.get("detail"))) == (400, message)


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
            assert [*too_much(f"{'[' * deeper}{text}{']' * deeper}".encode(), BOUNDS)] == [None]
            (why,) = too_much(f"{'[' * (deeper + 1)}{text}{']' * (deeper + 1)}".encode(), BOUNDS)
            assert why == "is nested 65 levels deep; at most 64 are read; send fewer levels"
