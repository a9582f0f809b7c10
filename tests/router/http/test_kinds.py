"""Values of every wrong kind in every field that the OpenAPI document has: each is refused, and named."""

import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from tests.router.http.conftest import StartHttp, one_answer, refusal

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "S-LoRA stream": ("/generate_stream", {"inputs": "x", "parameters": {"do_sample": True}}),
    "S-LoRA": ("/generate", {"inputs": "x", "parameters": {"do_sample": True}}),
    "llm-mock": ("/generate", {"prompt": "x"}),
    "load": ("/v1/load_lora_adapter", {"lora_name": "x", "rank": 4}),
    "unload": ("/v1/unload_lora_adapter", {"lora_name": "x"}),
    "tokenize": ("/tokenize", {"prompt": "x"}),
    "detokenize": ("/detokenize", {"tokens": [5]}),
}
VALUES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "integer": [7, 0, -(2**70)],
    "number": [1.5, 1e308],
    "string": ["x", "", "7", "true"],
    "array": [[None], [[[]]]],
    "object": [{}, {"a": 1}],
}
READ_AS: dict[str, set[str]] = {
    "boolean": {"0", '"true"'},
    "integer": {"true", "false", '"7"'},
    "number": {"true", "false", '"7"'},
}
"""Values of other kinds, as JSON, that are read too, as by vLLM."""
WRONG_ELEMENTS = [[1.5], [{}], [None], [5, "x"], ["x", 5], [[5, "x"]], [[[5]]]]
OUT_OF_RANGE: dict[str, list[Any]] = {
    "frequency_penalty": [-2.1, 2.1, -(10**300)],
    "logprobs": [-1, 21],
    "max_completion_tokens": [0, -1, 2**31],
    "max_tokens": [0, -1, 2**31],
    "min_p": [-0.1, 1.1, "-1"],
    "min_tokens": [-1, 2**31],
    "n": [0, -1, 16385],
    "presence_penalty": [-2.1, 2.1],
    "prompt_logprobs": [-1, 21],
    "rank": [-1, 2**32],
    "repetition_penalty": [0, -1],
    "seed": [2**63, -(2**63) - 1],
    "temperature": [-0.1, 2.1, 10**400],
    "top_k": [-2],
    "top_p": [0, -1, 1.1, 10**300],
    "truncate_prompt_tokens": [0, -2, 2**31],
}
SLORA_OUT_OF_RANGE: dict[str, list[Any]] = {
    "frequency_penalty": [-0.1],
    "max_new_tokens": [0, -1, 2**31],
    "presence_penalty": [-0.1, -(10**300)],
    "temperature": [-0.1],
    "top_k": [0, -2, 2**31],
    "top_p": [0, -1, 1.1],
}
REFUSALS = ("Bad Request", "BadRequestError")
"""Types of errors: of what pydantic refuses, and of other values."""
UNREADABLE = (
    *(b"", b"[]", b"5", b"null", b'"x"', b"{}", b"{", b"[" * 100_000, b'{"a":' * 100_000),
    *(b'{"%s": NaN}', b'{"%s": -Infinity}', b'{"%s": "\\ud800"}', b'{"%s": "\xff"}'),
    *(b'{"%s": ' + b"9" * 5000 + b"}",),
)


class Client:
    """Posts to the routes of a router that has no scheduler; `fields` are those of a route's body."""

    def __init__(self, document: dict[str, Any], ask: Any) -> None:
        self._schemas = document["components"]["schemas"]
        self._paths = document["paths"]
        self.post = ask

    def _of(self, schema: dict[str, Any]) -> dict[str, Any]:
        return self._schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    def _kinds(self, schema: dict[str, Any]) -> set[str]:
        schema = self._of(schema)
        if "anyOf" in schema:
            return set().union(*(self._kinds(one) for one in schema["anyOf"]))
        kind = schema.get("type")
        return {*VALUES} if kind is None else {"number", "integer"} if kind == "number" else {kind}

    def fields(self, path: str, body: dict[str, Any]) -> Iterator[tuple[list[str], set[str]]]:
        """Yield the path of each field, and the kinds of values that it takes."""
        schema = self._of(self._paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"])
        options = [self._of(one) for one in schema.get("anyOf", schema.get("oneOf", [schema]))]
        (schema,) = (one for one in options if set(body) <= set(one["properties"]))
        for name, field in schema["properties"].items():
            yield [name], self._kinds(field)
            if isinstance(body.get(name), dict):
                for inner, of_inner in self._of(field)["properties"].items():
                    yield [name, inner], self._kinds(of_inner)


@pytest.fixture
async def client(start_http: StartHttp) -> AsyncIterator[Client]:
    """A connection for all requests of a test."""
    router = await start_http()
    async with router.connection() as connection:
        reader, writer = connection
        writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
        document = json.loads((await one_answer(reader)).partition(b"\r\n\r\n")[2])
        yield Client(document, partial(refusal, connection))


def wrong_values(name: str, kinds: set[str], out_of_range: dict[str, list[Any]]) -> list[Any]:
    values = [value for kind, values in VALUES.items() if kind not in kinds for value in values]
    if "array" in kinds and kinds < set(VALUES):
        values += WRONG_ELEMENTS
    if kinds <= {"integer", "number", "null"}:
        values += out_of_range.get(name, [])
    return values


@pytest.mark.parametrize("kind", BODIES)
async def test_a_wrong_value_is_refused_by_its_fields_name_and_what_cannot_be_read_with_a_reason(
    client: Client, kind: str
) -> None:
    path, body = BODIES[kind]
    out_of_range = SLORA_OUT_OF_RANGE if "inputs" in body else OUT_OF_RANGE
    num_wrong = 0
    for where, kinds in client.fields(path, body):
        read = set().union(*(READ_AS.get(one, set()) for one in kinds))
        for value in wrong_values(where[-1], kinds, out_of_range):
            if json.dumps(value) in read or (
                where == ["messages"] and "prompt" in body and not isinstance(value, list)
            ):
                continue  # of a prompt and no conversation, /tokenize takes the prompt
            asked = {**body, where[0]: value if len(where) == 1 else {**body[where[0]], where[1]: value}}
            status, error = await client.post(path, asked)
            assert (status, error["type"] in REFUSALS) == (400, True), (where, value, error)
            field = error["param"].removeprefix("body.").removeprefix("input_")
            assert f"{field}.".startswith(f"{'.'.join(where)}."), (value, error)
            assert where[-1] in error["message"], (value, error)
            assert len(error["message"]) < 400, (where, error)
            num_wrong += 1
    assert num_wrong > 8
    for raw in UNREADABLE:
        status, error = await client.post(path, raw.replace(b"%s", next(iter(body)).encode()))
        assert (status, error.get("type", "Bad Request") in REFUSALS) == (400, True), (raw[:40], error)
        assert len(error.get("message", error.get("detail"))) < 300
