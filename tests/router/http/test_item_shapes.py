"""What `/v1/responses` and `/v1/messages` show of an output: its events, calls that are cut, and the cache."""

import json
from io import StringIO
from typing import Any

import pytest

from lorrery.router.edges.anthropic.routes import MessageShape
from lorrery.router.edges.responses.requests import ResponsesRequest
from lorrery.router.edges.responses.shapes import ResponseShape
from lorrery.router.http.answer import Collected
from lorrery.router.http.forms import Form, json_schema
from lorrery.router.http.token_details import LogprobsJson, TokenTexts
from lorrery.tokenizer.file import BuiltinTokenizer
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.endings import FinishReason

CALLS = json_schema({}, "tools")._replace(calls_tools=True)
TEXTS = TokenTexts(BuiltinTokenizer())
LENGTH, EOS = FinishReason.LENGTH, FinishReason.EOS


def response(form: Form | None = None, *, reads_calls: bool = False, **asked: Any) -> ResponseShape:
    request = ResponsesRequest.model_validate({"input": "x", **asked})
    return ResponseShape(
        "resp_1",
        "m",
        request,
        max_output_tokens=9,
        is_greedy=False,
        block_size=4,
        logprobs=LogprobsJson(TEXTS),
        form=form,
        reads_calls=reads_calls,
    )


def finish(reason: FinishReason = EOS, *, prompt: int = 10, cached: int = 0) -> router_pb2.Finish:
    usage = types_pb2.Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=3)
    return router_pb2.Finish(reason=reason.value, usage=usage)


def whole(shape: ResponseShape | MessageShape, text: str, end: router_pb2.Finish) -> dict[str, Any]:
    found: dict[str, Any] = json.loads("".join(shape.whole([Collected(text=StringIO(text), finish=end)])))
    return found


def streamed(shape: ResponseShape | MessageShape, texts: list[str], end: router_pb2.Finish) -> list[dict[str, Any]]:
    sent = [*shape.echo(0), *(shape.event(0, router_pb2.GenerateResponse(text=text), None) for text in texts)]
    sent += [shape.event(0, router_pb2.GenerateResponse(finish=end), None), shape.last_events([end.usage])]
    lines = b"".join(sent).decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


@pytest.mark.parametrize("said", ["[", '[{"name', '[{"name": "look", "parameters": '])
def test_a_required_call_that_is_cut_is_no_text(said: str) -> None:
    assert whole(response(CALLS, reads_calls=True), said, finish(LENGTH))["output"] == []
    assert whole(MessageShape("1", "m", 10, CALLS), said, finish(LENGTH))["content"] == [{"type": "text", "text": ""}]
    events = streamed(response(CALLS, reads_calls=True), [*said], finish(LENGTH))
    assert kinds(events) == ["created", "in_progress", "completed"]
    assert events[-1]["response"]["status"] == "incomplete"
    events = streamed(MessageShape("1", "m", 10, CALLS), [*said], finish(LENGTH))
    assert kinds(events) == ["message_start", "message_delta", "message_stop"]
    assert events[1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_events_without_text_are_left_out() -> None:
    events = streamed(response(), ["", "a", "", "b"], finish())
    assert kinds(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == [*range(10)]
    events = streamed(MessageShape("1", "m", 10), ["", "a", "", "b"], finish())
    assert kinds(events) == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_an_output_without_text_has_no_part() -> None:
    assert kinds(streamed(response(), [], finish())) == ["created", "in_progress", "completed"]
    (message,) = whole(response(), "", finish())["output"]
    assert message["content"] == []
    assert whole(response(reads_calls=True), "", finish())["output"] == []
    assert whole(MessageShape("1", "m", 10), "", finish())["content"] == [{"type": "text", "text": ""}]


def test_a_custom_tool_is_called_with_text() -> None:
    tools = [{"type": "custom", "name": "run"}]
    said = '[{"name": "run", "parameters": {"input": "ls -l"}}]'
    (item,) = whole(response(CALLS, reads_calls=True, tools=tools), said, finish())["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "run", "ls -l")
    events = streamed(response(CALLS, reads_calls=True, tools=tools), [*said], finish())
    assert kinds(events)[2:] == [
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    assert events[4]["input"] == "ls -l"


def test_a_tool_in_a_namespace_is_called_by_its_own_name() -> None:
    look = {"type": "function", "name": "look", "parameters": {}}
    tools = [{"type": "namespace", "name": "sky", "description": "d", "tools": [look]}]
    said = '[{"name": "sky__look", "parameters": {}}]'
    shape = response(CALLS, reads_calls=True, tools=tools, tool_choice={"type": "function", "name": "look"})
    (item,) = whole(shape, said, finish())["output"]
    assert (item["name"], item["namespace"], item["arguments"]) == ("look", "sky", "{}")


@pytest.mark.parametrize(("cached", "created"), [(0, 8), (4, 4), (8, 0)])
def test_usage_tells_what_the_cache_had_and_what_is_new_in_it(cached: int, created: int) -> None:
    end = finish(cached=cached)
    told = whole(response(), "a", end)["usage"]["input_tokens_details"]
    assert (told["cached_tokens"], told["cache_write_tokens"]) == (cached, created)
    assert whole(MessageShape("1", "m", 10, block_size=4), "a", end)["usage"] == {
        "input_tokens": 2,
        "output_tokens": 3,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
    }


@pytest.mark.parametrize(
    ("said", "stop", "reason"),
    [
        ('[{"name": "look", "parameters": {}}', "]", "tool_use"),  # the call is complete, so it counts
        ('[{"name": "look", "parameters": {"city": "R', "o", "stop_sequence"),
        ("no call", "x", "stop_sequence"),
        ("no call", "", "end_turn"),
    ],
)
def test_a_stop_sequence_within_a_call_ends_it_without_running_it(said: str, stop: str, reason: str) -> None:
    end = finish()
    end.stop_sequence = stop
    assert whole(MessageShape("1", "m", 10, CALLS), said, end)["stop_reason"] == reason
    (ending,) = [event for event in streamed(MessageShape("1", "m", 10, CALLS), [*said], end) if "delta" in event][-1:]
    assert ending["delta"]["stop_reason"] == reason


def test_a_message_ends_for_a_call_where_one_is_required() -> None:
    assert whole(MessageShape("1", "m", 10, requires_call=True), "a", finish())["stop_reason"] == "tool_use"
