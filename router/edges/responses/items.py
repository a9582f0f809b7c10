"""The input of `/v1/responses`: its items, and how chat templates read them.

Which kinds there are, and what each must have, is that of vLLM 0.32 (vllm/entrypoints/openai/responses/protocol.py),
whose types are those of OpenAI's Python package. What an assistant said, thought and called in several items is one
message, as there (utils.py).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lorrery.router.edges.as_chat import not_text, without_billing_header
from lorrery.router.edges.tools import ArgumentsReader
from lorrery.service.errors import InvalidRequest
from lorrery.service.names import quoted

_CONFIG = ConfigDict(extra="allow", protected_namespaces=())
_Status = Literal["in_progress", "completed", "incomplete"]


class InputText(BaseModel):
    """A part of a message that is text."""

    model_config = _CONFIG

    type: Literal["input_text"]
    text: str


class InputMedia(BaseModel):
    """A part of a message that is something else."""

    model_config = _CONFIG

    type: Literal["input_image", "input_file"]


Parts = Annotated[list[InputText | InputMedia], Field(fail_fast=True)]


class InputMessage(BaseModel):
    """What somebody said."""

    model_config = _CONFIG

    content: str | Parts
    role: Literal["user", "assistant", "system", "developer"]
    phase: Literal["commentary", "final_answer"] | None = None
    type: Literal["message"] = "message"


class OutputText(BaseModel):
    """A part of an earlier output."""

    model_config = _CONFIG

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = []


class Refusal(BaseModel):
    """An earlier output that refuses."""

    model_config = _CONFIG

    type: Literal["refusal"]
    refusal: str


class OutputMessage(BaseModel):
    """An earlier output."""

    model_config = _CONFIG

    content: Annotated[list[OutputText | Refusal], Field(fail_fast=True)]
    role: Literal["assistant"]
    type: Literal["message"]
    phase: Literal["commentary", "final_answer"] | None = None
    status: _Status = "completed"


class FunctionCall(BaseModel):
    """A call of a function."""

    model_config = _CONFIG

    arguments: str
    call_id: str
    name: str
    type: Literal["function_call"]
    namespace: str | None = None
    status: _Status | None = None


class CustomCall(BaseModel):
    """A call of a tool that takes text."""

    model_config = _CONFIG

    call_id: str
    input: str
    name: str
    type: Literal["custom_tool_call"]


class FunctionOutput(BaseModel):
    """What a function returned."""

    model_config = _CONFIG

    output: str | Parts
    type: Literal["function_call_output"]
    call_id: str | None = None
    name: str | None = None
    status: _Status | None = None


class CustomOutput(BaseModel):
    """What a tool that takes text returned."""

    model_config = _CONFIG

    call_id: str
    output: str | Parts
    type: Literal["custom_tool_call_output"]


class Thought(BaseModel):
    """A part of a model's reasoning."""

    model_config = _CONFIG

    text: str
    type: Literal["summary_text", "reasoning_text"]


class Reasoning(BaseModel):
    """What a model thought."""

    model_config = _CONFIG

    summary: Annotated[list[Thought], Field(fail_fast=True)]
    type: Literal["reasoning"]
    content: Annotated[list[Thought], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None
    status: _Status | None = None


_UNREAD: Mapping[str, Sequence[str]] = {
    "additional_tools": ("role", "tools"),
    "apply_patch_call": ("call_id", "operation", "status"),
    "apply_patch_call_output": ("call_id", "status"),
    "code_interpreter_call": ("id", "container_id", "status"),
    "compaction": ("encrypted_content",),
    "compaction_trigger": (),
    "computer_call": ("id", "call_id", "pending_safety_checks", "status"),
    "computer_call_output": ("call_id", "output"),
    "configuration_update": (),
    "file_search_call": ("id", "queries", "status"),
    "image_generation_call": ("id", "status"),
    "item_reference": ("id",),
    "local_shell_call": ("id", "action", "call_id", "status"),
    "local_shell_call_output": ("id", "output"),
    "mcp_approval_request": ("id", "arguments", "name", "server_label"),
    "mcp_approval_response": ("approval_request_id", "approve"),
    "mcp_call": ("id", "arguments", "name", "server_label"),
    "mcp_list_tools": ("id", "server_label", "tools"),
    "program": ("id", "call_id", "code", "fingerprint"),
    "program_output": ("id", "call_id", "result", "status"),
    "shell_call": ("action", "call_id"),
    "shell_call_output": ("call_id", "output"),
    "tool_search_call": ("arguments",),
    "tool_search_output": ("tools",),
    "web_search_call": ("id", "action", "status"),
}
"""Kinds of items that models do not read, and the fields that each must have."""


class OtherItem(BaseModel):
    """An item that models do not read."""

    model_config = _CONFIG

    type: str | None = "item_reference"

    @model_validator(mode="after")
    def _is_complete(self) -> "OtherItem":
        kind = "item_reference" if self.type is None else self.type
        if kind not in _UNREAD:
            raise ValueError(f"there are no items of type {quoted(kind)}")
        for name in _UNREAD[kind]:
            if name not in (self.model_extra or {}):
                raise ValueError(f"an item of type {quoted(kind)} has {name}; give it")
        return self


InputItem = (
    InputMessage | OutputMessage | FunctionCall | FunctionOutput | Reasoning | CustomCall | CustomOutput | OtherItem
)
Turn = dict[str, Any]


def turns(items: Sequence[InputItem]) -> list[Turn]:
    """Return items as messages for chat templates.

    Raises:
        InvalidRequest: one cannot be read.
    """
    found: list[Turn] = []
    arguments = ArgumentsReader()
    for number, item in enumerate(items):
        turn = _turn(item, f"input[{number}]", arguments)
        if turn["role"] != "assistant" or not _joined(found, turn):
            found.append(turn)
    return [{"content": "", **turn} for turn in found]


def _joined(found: Sequence[Turn], turn: Turn) -> bool:
    """Add what an assistant said, thought or called to its last turn; return whether that has room for it."""
    last = found[-1] if found else {}
    if last.get("role") != "assistant":
        return False
    if "tool_calls" in turn:
        last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
        return True
    further = {name: value for name, value in turn.items() if name != "role"}
    if any(name in last for name in further):
        return False
    last.update(further)
    return True


def _turn(item: InputItem, where: str, arguments: ArgumentsReader) -> Turn:
    if isinstance(item, FunctionCall):
        name = f"{item.namespace}__{item.name}" if item.namespace else item.name
        return _called(item.call_id, name, arguments.read(item.arguments, f"{where}.arguments"))
    if isinstance(item, CustomCall):
        return _called(item.call_id, item.name, {"input": item.input})
    if isinstance(item, FunctionOutput | CustomOutput):
        said = _text(item.output, f"{where}.output")
        return {"role": "tool", "content": said, "tool_call_id": item.call_id or ""}
    if isinstance(item, Reasoning):
        thought = _thought(item, where)
        return {"role": "assistant", "reasoning": thought, "reasoning_content": thought}
    if isinstance(item, OutputMessage):
        part = item.content[0] if item.content else None
        return {"role": "assistant", "content": part.text if isinstance(part, OutputText) else ""}
    if isinstance(item, InputMessage):
        content = _text(item.content, f"{where}.content")
        if item.role == "assistant" and not isinstance(content, str):
            content = content[0] if content else ""
        if item.role == "system":
            texts = [content] if isinstance(content, str) else content
            content = [without_billing_header(text) for text in texts]
        return {"role": item.role, "content": content}
    raise InvalidRequest(
        f"{where} is of type {quoted(str(item.type))}, which models do not read; leave it out", field="input"
    )


def _called(call_id: str, name: str, arguments: dict[str, Any]) -> Turn:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _thought(item: Reasoning, where: str) -> str:
    if item.encrypted_content:
        raise InvalidRequest(f"{where} has encrypted_content, which cannot be read; leave it out", field="input")
    thoughts = item.content or item.summary
    return thoughts[0].text if thoughts else ""


def _text(content: str | Sequence[InputText | InputMedia], where: str) -> str | list[str]:
    """Return a text, or those of its parts."""
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if isinstance(part, InputMedia):
            raise not_text(part.type, f"{where}[{number}]", "type" if part.type == "input_file" else None)
    return [part.text for part in content if isinstance(part, InputText)]


def is_to_be_continued(items: Sequence[InputItem]) -> bool:
    """Return whether the output continues the last item, an output that was cut."""
    last = items[-1] if items else None
    if not isinstance(last, InputMessage | OutputMessage | Reasoning):
        return False
    status = (last.model_extra or {}).get("status") if isinstance(last, InputMessage) else last.status
    return status in ("in_progress", "incomplete")
