"""Conversations of `/v1/messages` as chat templates read them: cases are answers of vLLM 0.32."""

from typing import Any

import pytest
from pydantic import ValidationError

from lorrery.router.edges.anthropic.requests import Conversation, MessagesRequest
from lorrery.service.errors import InvalidRequest

ASKED = {"role": "user", "content": "weather?"}
TOOL = {"name": "look", "input_schema": {}}


def conversation(*messages: dict[str, Any], **more: Any) -> Conversation:
    return Conversation.model_validate({"model": "m", "messages": list(messages), **more})


def read(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return conversation(*messages, **more).turns([])


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def result(*content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "1", "content": list(content)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_what_a_tool_returned_precedes_what_its_message_says() -> None:
    returned = {"role": "tool", "tool_call_id": "1", "content": "sun\nmoon"}
    message = user(text("a"), result(text("sun"), text("moon")), text("b"))
    assert read(message) == [returned, {"role": "user", "content": ["a", "b"]}]


def test_tools_that_a_tool_found_are_another_message_for_the_template() -> None:
    found = {"type": "tool_reference", "tool_name": "look"}
    assert read(user(result(text("sun"), found))) == [
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "tool_reference", "name": "look"}]},
    ]


def test_what_is_unknown_in_a_tools_result_is_passed_over_and_named() -> None:
    passed_over: list[str] = []
    turns = conversation(ASKED, user(result(text("sun"), {"type": "chart", "data": "x"}))).turns(passed_over)
    assert turns[1:] == [{"role": "tool", "tool_call_id": "1", "content": "sun"}]
    assert passed_over == ["messages[1].content[0].content[1] of type 'chart'"]


def test_a_system_may_say_more_within_a_conversation() -> None:
    late = {"role": "system", "content": [text("be "), text("brief")]}
    assert read(ASKED, late, system=[text("x-anthropic-billing-header: 5"), text("be kind")]) == [
        {"role": "system", "content": "be kind"},
        ASKED,
        {"role": "system", "content": "be brief"},
    ]
    assert read({"role": "system", "content": ""}, ASKED) == [ASKED]


def test_an_assistant_thinks_and_calls() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        text("I look."),
        {"type": "tool_use", "id": "1", "name": "look", "input": {"city": "Rome"}},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}
    thought = {"reasoning": "hm", "reasoning_content": "hm"}
    assert read({"role": "assistant", "content": blocks}) == [
        {"role": "assistant", "content": "I look.", **thought, "tool_calls": [call]}
    ]


@pytest.mark.parametrize("block", [{"type": "text"}, {"type": "image"}, {"type": "tool_reference", "tool_name": "a"}])
def test_a_users_message_without_anything_to_read_is_none(block: dict[str, Any]) -> None:
    assert read(user(block)) == []


@pytest.mark.parametrize(
    "message",
    [
        user({"type": "image", "source": {"type": "url", "url": "x"}}),
        user(result({"type": "image", "source": {}})),
        user(result({"type": "text", "text": 5})),
    ],
)
def test_what_is_no_text_is_refused_by_its_path(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[0\]"):
        read(message)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": None},
        user({"type": "document", "source": {}}),
        user({"type": "server_tool_use", "id": "1", "name": "look", "input": {}}),
        user({"type": "tool_use", "input": "x"}),
        user({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "look"}}),
        {"role": "system", "content": [{"type": "tool_addition"}]},
        {
            "role": "system",
            "content": [{"type": "tool_removal", "tool": {"type": "tool_definition", "definition": TOOL}}],
        },
    ],
)
def test_what_is_no_message_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        conversation(message)


def change(kind: str, name: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": {"type": "tool_reference", "name": name}}]}


def test_a_system_adds_and_removes_tools() -> None:
    given = {"type": "tool_definition", "definition": {**TOOL, "name": "run"}}
    added = {"role": "system", "content": [{"type": "tool_addition", "tool": given}]}

    def names(*messages: dict[str, Any]) -> list[str]:
        return [tool.name for tool in conversation(*messages, tools=[TOOL]).known_tools() or ()]

    assert names(ASKED) == ["look"]
    assert names(ASKED, added) == ["look", "run"]
    assert names(ASKED, added, change("tool_removal", "look")) == ["run"]
    assert names(ASKED, change("tool_removal", "look"), change("tool_addition", "look")) == ["look"]
    with pytest.raises(InvalidRequest, match="'fly', which is not among tools"):
        names(change("tool_removal", "fly"))


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({"max_tokens": 0}, ("max_tokens",)),
        ({"model": ""}, ("model",)),
        ({"stop_sequences": ["a"] * 5}, ("stop_sequences",)),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, ("thinking", "enabled", "budget_tokens")),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ()),
        ({"tool_choice": {"type": "tool"}}, ("tool_choice",)),
        ({"tools": [{"name": "look"}]}, ("tools", 0, "input_schema")),
        ({"cache_salt": ""}, ("cache_salt",)),
    ],
)
def test_bounds_are_vllms(asked: dict[str, Any], where: tuple[str | int, ...]) -> None:
    body = {"model": "m", "messages": [ASKED], "max_tokens": 9}
    MessagesRequest.model_validate(body)
    with pytest.raises(ValidationError) as caught:
        MessagesRequest.model_validate(body | asked)
    assert caught.value.errors()[0]["loc"] == where
