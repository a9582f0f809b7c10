"""The bodies of Anthropic's routes. Fields shared with OpenAI's are in generating.py."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from lorrery.chassis.errors import InvalidRequest
from lorrery.chassis.names import quoted
from lorrery.router.http.blocks import Block, Blocks, Content, text_of, unread
from lorrery.router.http.forms import Form, Function, chosen, of_format, only_one, with_tools
from lorrery.router.http.generating import LENIENT, GeneratingRequest, Texts, refuse_given
from lorrery.router.http.tool_calls import read_arguments

Switch = Annotated[bool, Field(strict=False)]
Whole = Annotated[int, Field(strict=False)]
Positive = Annotated[Whole, Field(ge=1, le=0x7FFFFFFF)]

_TEXTS = {"text": "text"}
_KINDS = ("text", "tool_use", "tool_result")
_UNREAD = ("thinking", "redacted_thinking")
"""Models do not read their reasoning from earlier turns."""

_BLOCKS: TypeAdapter[list[Block]] = TypeAdapter(Blocks)

_REFUSED = {
    "n": "a message is one output; send several requests, or use /v1/chat/completions",
    "prompt_logprobs": "a message has none; use /v1/chat/completions",
    "return_token_ids": "a message has none; use /v1/chat/completions",
}


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = LENIENT

    role: Literal["user", "assistant"]
    content: Content

    def turns(self, where: str) -> Iterator[dict[str, Any]]:
        """Yield the turn as messages for chat templates: the results of tools first.

        Raises:
            InvalidRequest: it has more than text and tools.
        """
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        said: list[str] = []
        calls: list[dict[str, Any]] = []
        num_results = 0
        for number, block in enumerate(self.content):
            at = f"{where}.content[{number}]"
            if block.type == "tool_use":
                given = read_arguments(block.field("input"), f"{at}.input")
                call = {"name": block.field("name") or "", "arguments": given}
                calls.append({"id": block.field("id") or "", "type": "function", "function": call})
            elif block.type == "tool_result":
                num_results += 1
                yield _result(block, at)
            elif block.type in _TEXTS:
                said.append(text_of([block], f"{where}.content", _TEXTS))
            elif block.type not in _UNREAD:
                raise unread(block.type, at, _KINDS)
        if said or calls or not num_results:
            turn = {"role": self.role, "content": "".join(said)}
            yield {**turn, "tool_calls": calls} if calls else turn


def _result(block: Block, where: str) -> dict[str, Any]:
    content = block.field("content")
    if isinstance(content, list):
        try:
            blocks = _BLOCKS.validate_python(content)
        except ValidationError as error:
            place, wrong = f"{where}.content", error.errors()[0]
            at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong["loc"])
            raise InvalidRequest(f"{place}{at}: {wrong['msg']}", field=f"{place}{at}") from None
        content = text_of(blocks, f"{where}.content", _TEXTS)
    return {"role": "tool", "content": str(content or ""), "tool_call_id": str(block.field("tool_use_id") or "")}


class ToolChoice(BaseModel):
    """Whether tools are to be called."""

    model_config = LENIENT

    type: str = Field(description="none, auto, any, or tool")
    name: str | None = Field(default=None, description="of the tool to call")
    disable_parallel_tool_use: Switch | None = Field(default=None, description="true: one call at most")


class OutputConfig(BaseModel):
    """How the output is to be."""

    model_config = LENIENT

    format: dict[str, Any] | None = Field(default=None, description="type json_schema, with schema")


class Conversation(BaseModel):
    """What has been said: what both routes read."""

    model_config = LENIENT

    model: str | None = Field(default=None, description="the base model, or an adapter; unset: the base model")
    messages_: Annotated[list[Message], Field(min_length=1, alias="messages", fail_fast=True)]
    system: Content | None = Field(default=None, description="what the conversation begins with")
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        default=None, description="tools that may be called, also for the chat template"
    )
    tool_choice: ToolChoice | None = Field(default=None, description="whether tools are to be called")

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables for the chat template."""
        chosen = self.tool_choice is None or self.tool_choice.type != "none"
        return {"tools": self.tools} if self.tools and chosen else {}

    def turns(self) -> list[dict[str, Any]]:
        """Return the conversation as messages for chat templates.

        Raises:
            InvalidRequest: it has more than text and tools.
        """
        system = text_of(self.system, "system", _TEXTS)
        found = [{"role": "system", "content": system}] if system else []
        for number, message in enumerate(self.messages_):
            found.extend(message.turns(f"messages[{number}]"))
        return found


class MessagesRequest(Conversation, GeneratingRequest):
    """The body of `/v1/messages`."""

    max_tokens: Positive
    stop: str | Texts | None = Field(default=None, alias="stop_sequences")
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(default=None, description="older name of output_config.format")

    fills_context: ClassVar[bool] = True

    @property
    def most_tokens(self) -> int | None:
        """See `GeneratingRequest`."""
        return self.max_tokens

    @property
    def top_logprobs(self) -> int | None:
        """See `GeneratingRequest`."""
        return None

    def form(self, tool_call_probability: float) -> Form | None:
        """See `GeneratingRequest`; a required call precedes other forms."""
        functions = [
            Function(tool["name"], tool["input_schema"])
            for tool in self.tools or ()
            if isinstance(tool.get("name"), str) and "input_schema" in tool
        ]
        asked = self.tool_choice or ToolChoice(type="auto")
        if asked.type not in ("none", "auto", "any", "tool"):
            raise InvalidRequest(
                f"tool_choice.type is {quoted(asked.type)}; it must be none, auto, any or tool",
                field="tool_choice.type",
            )
        choice: object = "required" if asked.type == "any" else asked.type
        if choice == "tool":
            choice = chosen(functions, asked.name, "tool_choice.name")
        wanted = self.output_format if self.output_config is None else self.output_config.format
        return with_tools(
            only_one([super().form(tool_call_probability), of_format(wanted, "output_config.format")]),
            functions,
            choice,
            several=not asked.disable_parallel_tool_use,
            probability=tool_call_probability,
        )

    def check(self) -> None:
        """See `GeneratingRequest`."""
        super().check()
        refuse_given(self, _REFUSED)
