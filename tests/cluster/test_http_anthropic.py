"""Anthropic's routes, byte for byte: what its package reads (anthropic 2.12: `_streaming.py`, `types/`)."""

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest
import pytest_asyncio

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster
from tests.cluster.http_client import exchange, json_of, status_of, text_of, unchunked

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

HELLO = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "lora-1", "messages": HELLO, "max_tokens": 6, "seed": 5}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
HEAD = {"type": "message", "role": "assistant", "model": "lora-1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all."""
    async with running_cluster(
        tmp_path_factory.mktemp("cluster"), "time_scale=0.1", "router.request_faults=true"
    ) as cluster:
        yield cluster
        await nothing_held(cluster)


async def messages(cluster: LocalCluster, **asked: Any) -> bytes:
    return await exchange(cluster, "POST", "/v1/messages", ASKED | asked, "x-request-id: mine")


async def streamed(cluster: LocalCluster, **asked: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream, each with its name."""
    events = unchunked(await messages(cluster, stream=True, **asked)).decode().split("\n\n")
    assert events.pop() == ""
    lines = [event.split("\n") for event in events]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


async def num_tokens(cluster: LocalCluster, **asked: Any) -> int:
    body = {"model": "lora-1", "messages": HELLO} | asked
    answer = await exchange(cluster, "POST", "/v1/messages/count_tokens", body)
    assert status_of(answer) == 200
    count: int = json_of(answer)["input_tokens"]
    assert json_of(answer)["context_management"] == {"original_input_tokens": count}
    return count


def expected(cluster: LocalCluster, max_tokens: int = 6) -> str:
    return text_of(cluster, Ask(seed=5, adapter_id="lora-1", max_new_tokens=max_tokens))


async def test_a_message_has_a_block_of_text_its_end_and_its_usage(cluster: LocalCluster) -> None:
    answer = await messages(cluster)
    assert b"\r\nrequest-id: mine\r\n" in answer
    assert json_of(answer) == {
        "id": "chatcmpl-mine",
        **HEAD,
        "content": [{"type": "text", "text": expected(cluster)}],
        "stop_reason": "max_tokens",
        "usage": {
            "input_tokens": await num_tokens(cluster, model="lora-1"),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 6,
        },
    }


async def test_a_stream_has_every_event_in_order(cluster: LocalCluster) -> None:
    events = await streamed(cluster)
    assert all(name == event["type"] for name, event in events)
    (_, start), (_, block), *deltas, (_, stop), (_, end), (_, last) = events
    count = await num_tokens(cluster)
    usage = {"input_tokens": count, "output_tokens": 0}
    message = {"id": "chatcmpl-mine", **HEAD, "content": [], "stop_reason": None, "stop_sequence": None}
    assert start == {"type": "message_start", "message": {**message, "usage": usage}}
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {(name, event["index"], event["delta"]["type"]) for name, event in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    assert "".join(event["delta"]["text"] for _, event in deltas) == expected(cluster)
    assert stop == {"type": "content_block_stop", "index": 0}
    ending = {"stop_reason": "max_tokens", "stop_sequence": None}
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert end == {"type": "message_delta", "delta": ending, "usage": {**usage, "output_tokens": 6, **cached}}
    assert last == {"type": "message_stop"}


async def test_the_stop_sequence_that_came_is_told(cluster: LocalCluster) -> None:
    text = expected(cluster)
    word = text.split()[3]
    asked = {"stop_sequences": ["no such words", word]}
    ending = {"stop_reason": "stop_sequence", "stop_sequence": word}
    whole = json_of(await messages(cluster, **asked))
    events = await streamed(cluster, **asked)
    assert whole["content"][0]["text"] == text[: text.index(word)]
    assert {name: whole[name] for name in ending} == ending
    assert [event["delta"] for name, event in events if name == "message_delta"] == [ending]


async def test_blocks_tools_and_system_are_read(cluster: LocalCluster) -> None:
    plain = await num_tokens(cluster)
    text = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    assert await num_tokens(cluster, messages=[{"role": "user", "content": [text]}]) == plain
    with_system = await num_tokens(cluster, system=[text])
    assert with_system == await num_tokens(cluster, system="hello") > plain
    called = [
        {"type": "thinking", "thinking": "well", "signature": ""},
        {"type": "tool_use", "id": "1", "name": "look", "input": {}},
    ]
    for content in ("nothing there", [{"type": "text", "text": "nothing there"}]):
        result = {"type": "tool_result", "tool_use_id": "1", "content": content}
        spoken = [*HELLO, {"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
        assert await num_tokens(cluster, messages=spoken) > plain


@pytest.mark.parametrize(
    ("asked", "status", "kind", "why"),
    [
        ({"model": "nobody"}, 404, "NotFoundError", "'nobody' does not exist"),
        ({"max_tokens": 9999}, 400, "BadRequestError", "max_model_len=4096"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "BadRequestError", "context length is 4096"),
        ({"messages": []}, 400, "BadRequestError", "conversation is empty"),
        ({"stop_sequences": [""]}, 400, "BadRequestError", "stop is empty"),
        ({"temperature": 2.1}, 400, "BadRequestError", "temperature is 2.1"),
        ({"cache_salt": "a/b"}, 400, "BadRequestError", "cache_salt"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, 400, "BadRequestError", "not among tools"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048},
            400,
            "BadRequestError",
            "thinking_token_budget",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            400,
            "BadRequestError",
            "messages[0].content[0] is of type 'image'",
        ),
    ],
)
async def test_what_a_route_refuses_is_in_anthropics_shape(
    cluster: LocalCluster, asked: dict[str, Any], status: int, kind: str, why: str
) -> None:
    answer = await messages(cluster, **asked)
    assert status_of(answer) == status
    content = json_of(answer)
    assert {**content, "error": {**content["error"], "message": ""}} == {
        "type": "error",
        "error": {"type": kind, "message": ""},
    }
    assert why in content["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"model": None}, "body.model"),
        ({"max_tokens": None}, "body.max_tokens"),
        ({"max_tokens": 0}, "body.max_tokens"),
        ({"stop_sequences": ["a"] * 5}, "body.stop_sequences"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "body.messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "body.messages.0.content"),
        ({"tool_choice": {"type": "required"}}, "body.tool_choice.type"),
        ({"tools": [{"name": "look"}]}, "body.tools.0.input_schema"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "body.thinking.enabled.budget_tokens"),
    ],
)
async def test_a_malformed_body_is_refused_as_on_any_route(
    cluster: LocalCluster, asked: dict[str, Any], param: str
) -> None:
    answer = await messages(cluster, **asked)
    error = json_of(answer)["error"]
    assert (status_of(answer), error["type"], error["param"], error["code"]) == (400, "Bad Request", param, 400)


async def test_what_vllm_passes_over_is_passed_over(cluster: LocalCluster) -> None:
    ignored = {"n": 2, "prompt_logprobs": 5, "structured_outputs": "x", "user": 5, "container": {}, "mcp_servers": [1]}
    whole = json_of(await messages(cluster, **ignored))
    assert whole["content"][0]["text"] == expected(cluster)


async def test_a_header_names_what_is_unknown_and_passed_over(cluster: LocalCluster) -> None:
    chart = {"type": 'chart"', "data": "x"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}, chart]}
    answer = await messages(cluster, messages=[{"role": "user", "content": [result]}])
    assert status_of(answer) == 200
    (warning,) = [line for line in answer.split(b"\r\n") if line.startswith(b"warning: ")]
    said = b"passed over: messages[0].content[0].content[1] of type 'chart''"
    assert warning == b'warning: 299 lorrery "' + said + b'"'
    assert b"warning: " not in await messages(cluster)


async def test_models_have_anthropics_fields_for_its_clients(cluster: LocalCluster) -> None:
    theirs = "anthropic-version: 2023-06-01"
    listed = json_of(await exchange(cluster, "GET", "/v1/models", None, theirs))
    assert [one["id"] for one in listed["data"]][:2] == [listed["first_id"], "lora-0"]
    assert (listed["data"][-1]["id"], listed["has_more"]) == (listed["last_id"], False)
    one = json_of(await exchange(cluster, "GET", "/v1/models/lora-1", None, theirs))
    assert one in listed["data"]
    assert (one["type"], one["display_name"], one["lifecycle"]) == ("model", "lora-1", "active")
    assert datetime.fromisoformat(one["created_at"]).tzinfo is not None
    assert "display_name" not in json_of(await exchange(cluster, "GET", "/v1/models/lora-1"))
    missing = json_of(await exchange(cluster, "GET", "/v1/models/nobody", None, theirs))
    assert (missing["type"], missing["error"]["type"]) == ("error", "NotFoundError")


async def test_a_body_that_is_no_json_and_a_route_that_is_none_are_refused_as_anywhere(cluster: LocalCluster) -> None:
    bad = await exchange(cluster, "POST", "/v1/messages", b"{")
    none = await exchange(cluster, "POST", "/v1/messages/batches", {})
    assert (status_of(bad), json_of(bad)["error"]["type"]) == (400, "Bad Request")
    assert (status_of(none), json_of(none)) == (404, {"detail": "Not Found"})


async def test_an_error_within_a_stream_is_its_last_event(cluster: LocalCluster) -> None:
    body = ASKED | {"max_tokens": 50, "stream": True}
    answer = await exchange(cluster, "POST", "/v1/messages", body, "lorrery-fault: cut,after=3", "x-request-id: mine")
    *_, event, rest = unchunked(answer).split(b"\n\n")
    name, _, error = event.partition(b"\ndata: ")
    assert (name, rest) == (b"event: error", b"")
    content = json.loads(error)
    assert (content["type"], content["error"]["type"]) == ("error", "internal_error")
