"""Anthropic's routes, byte for byte: what its package reads (anthropic 2.12: `_streaming.py`, `types/`)."""

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest
import pytest_asyncio

from lorrery.local.cluster import LocalCluster
from tests.cluster.client import Ask
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster
from tests.cluster.http_client import exchange, json_of, status_of, text_of, unchunked

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

HELLO = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "lora-1", "messages": HELLO, "max_tokens": 6, "seed": 5, "ignore_eos": True}
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
    answer = await exchange(cluster, "POST", "/v1/messages/count_tokens", {"messages": HELLO} | asked)
    assert status_of(answer) == 200
    count: int = json_of(answer)["input_tokens"]
    return count


def expected(cluster: LocalCluster, max_tokens: int = 6) -> str:
    return text_of(cluster, Ask(seed=5, adapter_id="lora-1", max_new_tokens=max_tokens))


async def test_a_message_has_a_block_of_text_its_end_and_its_usage(cluster: LocalCluster) -> None:
    answer = await messages(cluster)
    assert b"\r\nrequest-id: mine\r\n" in answer
    assert json_of(answer) == {
        "id": "msg_mine",
        **HEAD,
        "content": [{"type": "text", "text": expected(cluster)}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
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
    (_, start), (_, block), (_, ping), *deltas, (_, stop), (_, end), (_, last) = events
    count = await num_tokens(cluster)
    usage = {"input_tokens": count, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    message = {"id": "msg_mine", **HEAD, "content": [], "stop_reason": None, "stop_sequence": None}
    assert start == {"type": "message_start", "message": {**message, "usage": {**usage, "output_tokens": 0}}}
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert ping == {"type": "ping"}
    assert {(name, event["index"], event["delta"]["type"]) for name, event in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    assert "".join(event["delta"]["text"] for _, event in deltas) == expected(cluster)
    assert stop == {"type": "content_block_stop", "index": 0}
    ending = {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end == {"type": "message_delta", "delta": ending, "usage": {**usage, "output_tokens": 6}}
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
        ({"model": "nobody"}, 404, "not_found_error", "The model 'nobody' does not exist"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: "),
        ({"max_tokens": 9999}, 400, "invalid_request_error", "maximum context length is 4096 tokens"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences[0] is empty"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tools has no function"),
        ({"tool_choice": {"type": "required"}}, 400, "invalid_request_error", "none, auto, any or tool"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, 400, "invalid_request_error", "not among tools"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error", "has no schema"),
        ({"n": 2}, 400, "invalid_request_error", "a message is one output"),
        ({"prompt_logprobs": 0}, 400, "invalid_request_error", "a message has none"),
        ({"messages": [{"role": "banana", "content": "x"}]}, 400, "invalid_request_error", "'user' or 'assistant'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type is 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].content[0].type is 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [5]}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].content",
        ),
    ],
)
async def test_errors_are_in_anthropics_shape(
    cluster: LocalCluster, asked: dict[str, Any], status: int, kind: str, why: str
) -> None:
    answer = await messages(cluster, **asked)
    assert status_of(answer) == status
    content = json_of(answer)
    assert (content["type"], content["error"]["type"], content["request_id"]) == ("error", kind, "mine")
    assert why in content["error"]["message"]


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
    assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")


async def test_a_body_that_is_no_json_and_a_route_that_is_none_are_told_alike(cluster: LocalCluster) -> None:
    bad = await exchange(cluster, "POST", "/v1/messages", b"{")
    none = await exchange(cluster, "POST", "/v1/messages/batches", {})
    assert (status_of(bad), json_of(bad)["error"]["type"]) == (400, "invalid_request_error")
    assert (status_of(none), json_of(none)["error"]["type"]) == (404, "not_found_error")


async def test_an_error_within_a_stream_is_its_last_event(cluster: LocalCluster) -> None:
    body = ASKED | {"max_tokens": 50, "stream": True}
    answer = await exchange(cluster, "POST", "/v1/messages", body, "lorrery-fault: cut,after=3", "x-request-id: mine")
    *_, event, rest = unchunked(answer).split(b"\n\n")
    name, _, error = event.partition(b"\ndata: ")
    assert (name, rest) == (b"event: error", b"")
    content = json.loads(error)
    assert (content["type"], content["request_id"]) == ("error", "mine")
    assert content["error"]["type"] in ("api_error", "overloaded_error")
