"""The bodies of Anthropic's routes, with the fields, types and bounds of vLLM 0.32.

vLLM's own models are in vllm/entrypoints/anthropic/protocol.py, and how it reads a conversation in serving.py: what
tools returned precedes what else their message says, and blocks that models do not read are passed over. What is
generated is asked for as a chat is (as_chat.py).
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from lorrery.router.edges.as_chat import BILLING_HEADER, as_chat, not_text, without_billing_header
from lorrery.router.http.forms import Form, Function, chosen, with_tools
from lorrery.router.http.generating import LENIENT, Arguments
from lorrery.router.http.openai_requests import ChatRequest
from lorrery.service.errors import InvalidRequest
from lorrery.service.names import quoted

_GENERATION = (
    *("model", "stream", "temperature", "top_p", "top_k", "cache_salt", "kv_transfer_params", "ec_transfer_params"),
    *("vllm_xargs", "chat_template_kwargs", "mock_output"),
)
"""Fields that mean what they mean in a chat."""
_RESULTS = ("text", "image", "tool_reference")
"""Types of what a tool may return; others are passed over."""


class Tool(BaseModel):
    """A tool that may be called."""

    model_config = LENIENT

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None

    @field_validator("input_schema")
    @classmethod
    def _of_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", **schema}


class ToolReference(BaseModel):
    """A tool that is named."""

    model_config = LENIENT

    type: Literal["tool_reference"]
    name: str


class ToolDefinition(BaseModel):
    """A tool that is given."""

    model_config = LENIENT

    type: Literal["tool_definition"]
    definition: Tool


class Block(BaseModel):
    """A block of content; its fields depend on its type."""

    model_config = LENIENT

    type: Literal[
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    tool_name: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    tool: Annotated[ToolReference | ToolDefinition, Field(discriminator="type")] | None = None

    @property
    def changes_tools(self) -> bool:
        """Whether it adds or removes a tool."""
        return self.type in ("tool_addition", "tool_removal")

    @model_validator(mode="after")
    def _names_its_tool(self) -> "Block":
        if self.changes_tools and self.tool is None:
            raise ValueError(f"a block of type {self.type} has a tool; give it")
        if self.type == "tool_removal" and not isinstance(self.tool, ToolReference):
            raise ValueError("a tool_removal names its tool; give a tool_reference")
        return self


Content = str | Annotated[list[Block], Field(fail_fast=True)]


def _no_changes_of_tools(content: Content | None) -> None:
    if isinstance(content, list) and any(block.changes_tools for block in content):
        raise ValueError("only a message of the system may add or remove tools")


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = LENIENT

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _system_changes_tools(self) -> "Message":
        if self.role != "system":
            _no_changes_of_tools(self.content)
        return self

    def turns(self, where: str, passed_over: list[str]) -> Iterator[dict[str, Any]]:
        """Yield the turn as messages for chat templates: the results of tools first.

        Args:
            where: its path in the request, for errors.
            passed_over: gets what a template cannot read and the model does not need.

        Raises:
            InvalidRequest: it has more than text and tools.
        """
        if self.role == "system":
            if system := _system_text(self.content):
                yield {"role": "system", "content": system}
            return
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        said, thought, calls = list[str](), list[str](), list[dict[str, Any]]()
        for number, block in enumerate(self.content):
            at = f"{where}.content[{number}]"
            if block.type == "text" and block.text:
                said.append(block.text)
            elif block.type == "image" and block.source:
                raise not_text("image", at)
            elif block.type == "thinking" and block.thinking is not None:
                thought.append(block.thinking)
            elif block.type == "tool_use":
                call = {"name": block.name or "", "arguments": block.input or {}}
                calls.append({"id": block.id or "call", "type": "function", "function": call})
            elif block.type == "tool_result" and self.role == "user":
                yield from _results(block, at, passed_over)
            elif block.type == "tool_result":
                said.append(f"Tool result: {block.content or ''}")
        turn: dict[str, Any] = {"role": self.role, "content": said[0] if len(said) == 1 else said or ""}
        if self.role == "assistant":
            if thought:
                turn |= dict.fromkeys(("reasoning", "reasoning_content"), "".join(thought))
            yield {**turn, "tool_calls": calls} if calls else turn
        elif said:
            yield turn


def _results(block: Block, where: str, passed_over: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what a tool returned: its text, and then the tools that it has found, which a template may describe."""
    turn = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
    if not isinstance(block.content, list):
        yield {**turn, "content": block.content or ""}
        return
    texts, found = list[str](), list[dict[str, Any]]()
    for number, one in enumerate(block.content):
        at, kind = f"{where}.content[{number}]", one.get("type")
        if kind == "image":
            raise not_text("image", at)
        if kind not in _RESULTS:
            passed_over.append(f"{at} of type {quoted(str(kind))}")
        elif kind == "text":
            text = one.get("text", "")
            if not isinstance(text, str):
                raise InvalidRequest(f"{at}.text is no text; give one")
            texts.append(text)
        elif name := one.get("tool_name") or one.get("name"):
            found.append({"type": "tool_reference", "name": str(name)})
    yield {**turn, "content": "\n".join(texts)}
    if found:
        yield {**turn, "content": found}


def _system_text(content: Content) -> str:
    """Return what a system says, without texts that begin with Claude Code's line on billing."""
    texts = [content] if isinstance(content, str) else [block.text or "" for block in content if block.type == "text"]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


class ToolChoice(BaseModel):
    """Whether tools are to be called."""

    model_config = LENIENT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="of the tool to call")
    disable_parallel_tool_use: bool | None = Field(default=None, description="true: one call at most")

    @model_validator(mode="after")
    def _names_the_tool(self) -> "ToolChoice":
        if self.type == "tool" and not self.name:
            raise ValueError("a tool_choice of type tool has a name; give it")
        return self


class JsonFormat(BaseModel):
    """JSON, under a schema."""

    model_config = LENIENT

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(BaseModel):
    """How the output is to be."""

    model_config = LENIENT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="for the chat template"
    )
    format: JsonFormat | None = Field(default=None, description="type json_schema, with schema")


_Display = Literal["summarized", "omitted", "updates"]


class Thinking(BaseModel):
    """Thinking of a bounded length."""

    model_config = LENIENT

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1024)]
    display: _Display | None = None


class NoThinking(BaseModel):
    """No thinking."""

    model_config = LENIENT

    type: Literal["disabled"]


class AnyThinking(BaseModel):
    """Thinking as the model likes it."""

    model_config = LENIENT

    type: Literal["adaptive"]
    display: _Display | None = None


class Conversation(BaseModel):
    """What has been said: what both routes read."""

    model_config = LENIENT

    model: str = Field(description="the base model, or an adapter")
    messages_: Annotated[list[Message], Field(alias="messages", fail_fast=True)]
    output_config: OutputConfig | None = None
    system: Content | None = Field(default=None, description="what the conversation begins with")
    thinking: Annotated[Thinking | NoThinking | AnyThinking, Field(discriminator="type")] | None = None
    tool_choice: ToolChoice | None = Field(default=None, description="whether tools are to be called")
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(
        default=None, description="tools that may be called, also for the chat template"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="for the chat template")

    @field_validator("model")
    @classmethod
    def _some_model(cls, model: str) -> str:
        if not model:
            raise ValueError("model is empty; name one")
        return model

    @field_validator("system")
    @classmethod
    def _no_changes_of_tools(cls, system: Content | None) -> Content | None:
        _no_changes_of_tools(system)
        return system

    def turns(self, passed_over: list[str]) -> list[dict[str, Any]]:
        """Return the conversation as messages for chat templates; `passed_over`: see `Message.turns`.

        Raises:
            InvalidRequest: it is empty, or has more than text and tools.
        """
        system = self.system if isinstance(self.system, str) else _system_text(self.system or [])
        found = [{"role": "system", "content": without_billing_header(system)}] if system else []
        for number, message in enumerate(self.messages_):
            found.extend(message.turns(f"messages[{number}]", passed_over))
        return found

    @property
    def choice(self) -> str | None:
        """Which tools are to be called, in a chat's words: `none`, `auto`, `required`, or `tool`; None: none."""
        if self.tool_choice is not None:
            return "required" if self.tool_choice.type == "any" else self.tool_choice.type
        return None if self.known_tools() is None else "auto"

    def known_tools(self) -> Sequence[Tool] | None:
        """Return the tools at the end of the conversation, in which messages of the system may add and remove some.

        Raises:
            InvalidRequest: one of those names an unknown tool.
        """
        contents = [message.content for message in self.messages_ if not isinstance(message.content, str)]
        changes = [block for blocks in contents for block in blocks if block.changes_tools]
        if not changes:
            return self.tools
        known, removed = {tool.name: tool for tool in self.tools or ()}, set[str]()
        for block in changes:
            if isinstance(block.tool, ToolDefinition):
                name = block.tool.definition.name
                known[name] = block.tool.definition
            else:
                assert block.tool is not None
                name = block.tool.name
            if name not in known:
                raise InvalidRequest(f"a block of type {block.type} names {quoted(name)}, which is not among tools")
            if block.type == "tool_removal":
                removed.add(name)
            else:
                removed.discard(name)
        return [tool for name, tool in known.items() if name not in removed]

    def chat(self) -> ChatRequest:
        """Return what is to be generated, as a chat without its conversation.

        Raises:
            InvalidRequest: it has a value that no chat may have.
        """
        return as_chat(self._in_chat())

    def _in_chat(self) -> dict[str, Any]:
        """Return the fields of the chat."""
        given: dict[str, Any] = {"chat_template_kwargs": self.chat_template_kwargs}
        tools = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in self.known_tools() or ()
        ]
        if tools:
            given |= {"tools": tools, "tool_choice": "none"}
        if self.output_config is not None:
            given["reasoning_effort"] = self.output_config.effort
        if isinstance(self.thinking, NoThinking):
            given["reasoning_effort"] = "none"
        return given


class MessagesRequest(Conversation):
    """The body of `/v1/messages`."""

    max_tokens: int
    metadata: dict[str, Any] | None = Field(default=None, description="without effect")
    stop_sequences: Annotated[list[str], Field(max_length=4, fail_fast=True)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = Field(default=None, description="0 and -1: all tokens")
    top_p: float | None = None
    mm_payload: Literal["tensors", "none"] = Field(default="tensors", description="without effect")
    return_mm_kwargs: bool | None = Field(default=None, description="without effect")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    watermarking: bool | None = Field(default=None, description="without effect")
    kv_transfer_params: dict[str, Any] | None = Field(default=None, description="without effect")
    ec_transfer_params: dict[str, Any] | None = Field(default=None, description="without effect")
    vllm_xargs: Arguments | None = Field(default=None, description="without effect")
    mock_output: str | None = Field(default=None, description="what the mock model says, word for word")
    seed: Any = Field(default=None, description="a number: the same output for the same request")
    user: Any = Field(default=None, description="text: the tenant, where no API keys are asked for")

    @field_validator("max_tokens")
    @classmethod
    def _some_tokens(cls, max_tokens: int) -> int:
        if max_tokens <= 0:
            raise ValueError("max_tokens is not positive; it must be at least 1")
        return max_tokens

    @model_validator(mode="after")
    def _leaves_room_for_output(self) -> "MessagesRequest":
        is_prefill = bool(self.kv_transfer_params and self.kv_transfer_params.get("do_remote_decode"))
        if isinstance(self.thinking, Thinking) and not is_prefill and self.thinking.budget_tokens >= self.max_tokens:
            raise ValueError("thinking.budget_tokens must be below max_tokens")
        return self

    def _in_chat(self) -> dict[str, Any]:
        given = super()._in_chat() | {name: getattr(self, name) for name in _GENERATION}
        given |= {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}
        wanted = None if self.output_config is None else self.output_config.format
        if wanted is not None and wanted.schema_:
            schema = {"name": wanted.type, "schema": wanted.schema_}
            given["response_format"] = {"type": "json_schema", "json_schema": schema}
        if isinstance(self.seed, int) and abs(self.seed) < 2**63:
            given["seed"] = self.seed
        if isinstance(self.thinking, Thinking):
            given["thinking_token_budget"] = self.thinking.budget_tokens
        return given

    def form(self, chat: ChatRequest, tool_call_probability: float) -> Form | None:
        """Return the form of the output; a required call precedes other forms. None: any.

        Args:
            chat: what is to be generated.
            tool_call_probability: with which an output calls tools where it may and need not.

        Raises:
            InvalidRequest: it asks for a form that is not supported, or for a tool that is not there.
        """
        functions = [Function(tool.name, tool.input_schema) for tool in self.known_tools() or ()]
        choice: object = self.choice
        if choice == "tool":
            assert self.tool_choice is not None
            choice = chosen(functions, self.tool_choice.name, "tool_choice.name")
        elif not functions:
            choice = "none"  # as in vLLM, even where a call is required
        several = self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use
        return with_tools(chat.form(0), functions, choice, several=several, probability=tool_call_probability)
