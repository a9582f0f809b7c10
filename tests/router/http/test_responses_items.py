"""Items of `/v1/responses` as chat templates read them: cases are answers of vLLM 0.32."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from lorrery.router.edges.responses.items import InputItem, is_to_be_continued, turns
from lorrery.service.errors import InvalidRequest

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
ASKED = {"role": "user", "content": "weather?"}
CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"city": "Rome"}'}
CALLED = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def read(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return turns(ITEMS.validate_python(list(items)))


def test_what_an_assistant_thought_said_and_called_is_one_turn() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
    other = CALL | {"call_id": "2", "namespace": "sky"}
    result = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "sun"}]}
    again = {"id": "2", "type": "function", "function": {"name": "sky__look", "arguments": {"city": "Rome"}}}
    assert read(ASKED, thought, said("I look."), CALL, other, result, said("Sun.")) == [
        ASKED,
        {
            "role": "assistant",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "content": "I look.",
            "tool_calls": [CALLED, again],
        },
        {"role": "tool", "content": ["sun"], "tool_call_id": "1"},
        {"role": "assistant", "content": "Sun."},
    ]


def test_two_things_said_are_two_turns() -> None:
    assert read(said("a"), said("b")) == [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read(CALL, said("b")) == [{"role": "assistant", "tool_calls": [CALLED], "content": "b"}]


def test_text_given_to_a_custom_tool_is_its_input() -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "run", "input": "ls"}
    output = {"type": "custom_tool_call_output", "call_id": "1", "output": "a b"}
    first, second = read(call, output)
    assert first["tool_calls"][0]["function"] == {"name": "run", "arguments": {"input": "ls"}}
    assert second == {"role": "tool", "content": "a b", "tool_call_id": "1"}


def test_a_line_on_billing_is_left_out_of_what_a_system_says() -> None:
    system = {"role": "system", "content": "x-anthropic-billing-header: 5\nbe brief"}
    assert read(system) == [{"role": "system", "content": ["be brief"]}]
    assert read({**system, "role": "user"})[0]["content"].startswith("x-anthropic")


@pytest.mark.parametrize(
    ("last", "goes_on"),
    [
        (said("a"), False),
        (said("a", status="completed"), False),
        (said("a", status="incomplete"), True),
        ({"role": "assistant", "content": "a", "status": "in_progress"}, True),
        ({**CALL, "status": "incomplete"}, False),
    ],
)
def test_an_output_that_was_cut_is_continued(last: dict[str, Any], goes_on: bool) -> None:
    assert is_to_be_continued(ITEMS.validate_python([ASKED, last])) is goes_on


@pytest.mark.parametrize(
    "item",
    [
        {"role": "tool", "content": "a"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},  # only an item of type message has it
        {"role": "user", "content": "a", "type": None},
        {"type": "message", "content": "a"},
        {"type": "x", "role": "user", "content": "a"},
        {**CALL, "status": "x"},
        {"type": "function_call", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1"},
        {"type": "function_call_output", "call_id": 5, "output": "a"},
        {"type": "reasoning", "id": "r"},
        {"type": "mcp_call"},
        {},
    ],
)
def test_what_is_no_item_is_refused(item: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ITEMS.validate_python([item])


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "item_reference", "id": "r"}, "input"),
        ({"id": "r"}, "input"),
        ({"type": "compaction", "encrypted_content": "x"}, "input"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, "input"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "type"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, None),
    ],
)
def test_an_item_that_models_of_text_do_not_read_is_refused_by_name(item: dict[str, Any], field: str | None) -> None:
    with pytest.raises(InvalidRequest, match=r"input\[0\]") as caught:
        read(item)
    assert caught.value.facts.get("field") == field
