"""The bodies of OpenAI's routes. The fields that all of them share are in generating.py."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lorrery.router.edges.tools import ArgumentsReader
from lorrery.router.http.forms import Form, openai_choice, openai_functions, with_tools
from lorrery.router.http.generating import LENIENT, GeneratingRequest, NullIsZero, Options, refused
from lorrery.service.errors import InvalidRequest
from lorrery.service.names import cut, quoted

_MOST_PROMPTS = 1024
_OWN_VARIABLES = ("self", "messages", "add_generation_prompt", "continue_final_message")
"""Variables of the chat template that have fields of their own, which take precedence."""
_TEXTS = dict.fromkeys(("text", "input_text", "output_text"), "text") | {"refusal": "refusal", "thinking": "thinking"}
"""Types of parts with text, and the field of each with it."""
_UNREAD = "tool_reference"
"""Type of a part that templates do not read."""
_LATER = ("a text", "input_text", "output_text")
"""What the first part of a message in one of OpenAI's roles cannot be: vLLM then reads it as its own, looser kind."""
_ROLES = ("developer", "system", "user", "assistant", "tool")
_NULL_CONTENT = ("assistant", "function")
"""Roles whose messages may have null in place of content."""


class CompletionRequest(GeneratingRequest):
    """The body of `/v1/completions`."""

    prompt: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]], Field(fail_fast=True)]
        | str
        | Annotated[list[str], Field(fail_fast=True)]
        | None
    ) = None
    n: int = 1
    max_tokens: int | None = Field(default=16, description="0 only with echo")
    echo: bool | None = Field(default=False, description="the text begins with the prompt")
    logprobs: int | None = Field(default=None, description="how likely each token was, with so many alternatives")
    suffix: str | None = None
    prompt_embeds: bytes | Annotated[list[bytes], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = Field(default=True, description="whether a text begins with the token for that")

    @model_validator(mode="before")
    @classmethod
    def _check_prompt(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        prompt = given.get("prompt")
        if prompt in (None, "") and given.get("prompt_embeds") in (None, []):
            raise InvalidRequest("prompt is empty; give text or tokens", field="prompt")
        if isinstance(prompt, list) and len(prompt) > _MOST_PROMPTS and not isinstance(prompt[0], int):
            raise InvalidRequest(
                f"prompt has {len(prompt)} prompts; at most {_MOST_PROMPTS} are allowed; send several requests",
                field="prompt",
                value=len(prompt),
                limit=_MOST_PROMPTS,
            )
        return given

    @property
    def echoes_only(self) -> bool:
        """Whether only the prompt is wanted back, without output."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def most_tokens(self) -> int | None:
        """See `GeneratingRequest`: computing a prompt always gives one output token, wanted or not."""
        return 1 if self.echoes_only else 16 if self.max_tokens is None else self.max_tokens

    @property
    def top_logprobs(self) -> int | None:
        """See `GeneratingRequest`."""
        return self.logprobs

    @property
    def echoed_logprobs(self) -> int | None:
        """See `GeneratingRequest`."""
        return self.logprobs if self.echo else None

    @property
    def adds_special_tokens(self) -> bool:
        """See `GeneratingRequest`."""
        return self.add_special_tokens

    @property
    def lists_prompts(self) -> bool:
        """Whether `prompt` is a list of prompts, even of one."""
        return isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Its prompts, each as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: Any = self.prompt
        return prompts if self.lists_prompts or not prompts else [prompts]

    def check(self) -> None:
        """See `GeneratingRequest`."""
        super().check()
        if not self.prompts:
            raise InvalidRequest("prompt is empty; give text or tokens", field="prompt")


def _part(part: object, field: str) -> str:
    """Return the text of a part of a message; `field`: its name, for errors.

    Raises:
        InvalidRequest: it is not text.
    """
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == _UNREAD:
        return ""
    if not isinstance(part, dict) or kind not in _TEXTS:
        raise InvalidRequest(
            f"{field} is of type {quoted(str(kind))}, and the mock model reads text only; leave out images, audio"
            " and files",
            field=field,
            value=quoted(str(kind)),
        )
    name = _TEXTS[kind]
    text = part.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.{name} is missing, or no text; give one", field=f"{field}.{name}")
    return text


class CalledFunction(BaseModel):
    """The function of a call, and its arguments as JSON."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """One turn of a conversation; the chat template may read further fields."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    role: str
    content: str | list[Any] | dict[Any, Any] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_null(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("content", "") is None:
            if given.get("role") not in _NULL_CONTENT:
                raise ValueError("content is null, which only an assistant's may be")
            if given.get("tool_calls", ()) is None:
                raise ValueError("content and tool_calls are null; leave out tool_calls")
        return given

    def text(self, field: str) -> str | list[str]:
        """Return the text, or that of its parts; `field`: its name, for errors.

        Raises:
            InvalidRequest: a part of it is not text.
        """
        if not isinstance(self.content, list):
            return self.content or "" if isinstance(self.content, str) else ""
        first = self.content[0] if self.content else {}
        kind = first.get("type") if isinstance(first, dict) else "a text" if isinstance(first, str) else None
        if self.role in _ROLES and kind in _LATER and "tool_calls" not in self.model_fields_set:
            raise InvalidRequest(
                f"{field}.content[0] is {kind}; the first part is an object of type text", field=f"{field}.content[0]"
            )
        return [_part(part, f"{field}.content[{number}]") for number, part in enumerate(self.content)]

    def turn(self, where: str, arguments: ArgumentsReader) -> dict[str, Any]:
        """Return the turn as a message for chat templates, without fields that are null.

        Args:
            where: its path in the request, for errors.
            arguments: reads those of its calls.

        Raises:
            InvalidRequest: it has more than text and tool calls.
        """
        further = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        turn = {**further, "role": self.role, "content": self.text(where)}
        if self.role != "assistant" or not self.tool_calls:
            return turn
        return {
            **turn,
            "tool_calls": [
                _read(call, f"{where}.tool_calls[{n}]", arguments) for n, call in enumerate(self.tool_calls)
            ],
        }


def _read(call: ToolCall, where: str, arguments: ArgumentsReader) -> dict[str, Any]:
    """Return a call with its arguments as an object."""
    found = arguments.read(call.function.arguments, f"{where}.function.arguments")
    return {**call.model_dump(), "function": {**call.function.model_dump(), "arguments": found}}


def turns(messages: Sequence[ChatMessage], *, to_be_continued: bool = False) -> list[dict[str, Any]]:
    """Return a conversation as messages for chat templates.

    Args:
        messages: of the conversation.
        to_be_continued: whether an answer continues the last one.

    Raises:
        InvalidRequest: it has more than text and tool calls, or no text to continue.
    """
    if to_be_continued and messages and (messages[-1].content is None or messages[-1].content == []):
        field = f"messages[{len(messages) - 1}].content"
        raise InvalidRequest(f"{field} has no text, and continue_final_message is set; give one", field=field)
    arguments = ArgumentsReader()
    return [message.turn(f"messages[{number}]", arguments) for number, message in enumerate(messages)]


class FunctionDefinition(BaseModel):
    """A function that may be called."""

    model_config = LENIENT

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that may be called."""

    model_config = LENIENT

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(BaseModel):
    """A function to call."""

    model_config = LENIENT

    name: str


class ToolChoice(BaseModel):
    """A tool to call."""

    model_config = LENIENT

    function: FunctionName
    type: Literal["function"] = "function"


def template_variables(chat_template: str | None, given: Mapping[str, Any] | None, **fields: object) -> dict[str, Any]:
    """Return further variables for the chat template.

    Args:
        chat_template: the request's own; None: as it should be.
        given: `chat_template_kwargs`.
        fields: variables that are fields of the request, which take precedence; None and empty: not given.

    Raises:
        InvalidRequest: the request brings a template.
    """
    variables = dict(given or {})
    if chat_template is not None or variables.pop("chat_template", None) is not None:
        raise refused(
            "chat_template", chat_template, "the router runs no code of its clients; router.tokenizer brings it"
        )
    if "messages" in variables:
        raise InvalidRequest(
            "chat_template_kwargs has messages, which is a field of its own; leave one out",
            field="chat_template_kwargs",
        )
    variables.update({name: value for name, value in fields.items() if value})
    return {name: value for name, value in variables.items() if name not in _OWN_VARIABLES}


class ChatRequest(GeneratingRequest):
    """The body of `/v1/chat/completions`."""

    messages_: Annotated[list[ChatMessage], Field(alias="messages", fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, description="unset: max_tokens")
    max_tokens: int | None = Field(default=None, description="unset: what the prompt leaves of the context")
    logprobs: bool | None = Field(default=False, description="how likely each token was")
    top_logprobs_: NullIsZero = Field(
        default=0, alias="top_logprobs", description="so many alternatives to each token; needs logprobs"
    )
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(
        default=None, description="functions that may be called, also for the chat template"
    )
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        default="none", description="none, auto (the default with tools), required, or a function to call"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="for the chat template"
    )
    include_reasoning: bool = Field(default=True, description="without effect")
    parallel_tool_calls: bool | None = Field(default=True, description="false: one call at most")
    echo: bool = Field(default=False, description="the text begins with the assistant's last message")
    documents: Annotated[list[Annotated[dict[str, str], Field(fail_fast=True)]], Field(fail_fast=True)] | None = Field(
        default=None, description="for the chat template"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="for the chat template")
    add_generation_prompt: bool = Field(
        default=True, description="whether the prompt ends with what begins the assistant's turn"
    )
    continue_final_message: bool = Field(default=False, description="the prompt ends within the last message")
    add_special_tokens: bool = Field(default=False, description="whether a token for that begins the rendered text")
    chat_template: str | None = None
    media_io_kwargs: Options | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = Field(default=None, description="the answer has the rendered prompt")

    logprobs_name: ClassVar[str] = "top_logprobs"

    @model_validator(mode="before")
    @classmethod
    def _check_logprobs(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("top_logprobs") and not given.get("logprobs"):
            raise InvalidRequest(
                f"top_logprobs is {cut(str(given['top_logprobs']))}; it needs logprobs: true; set that too",
                field="top_logprobs",
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _check_tools(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        tools, choice = given.get("tools"), given.get("tool_choice")
        if tools == []:
            raise InvalidRequest("tools is empty; give one, or leave it out", field="tools")
        if "tool_choice" not in given:
            return {**given, "tool_choice": "auto"} if tools else given
        if choice in (None, "none"):
            return given
        if tools is None:
            raise InvalidRequest("tool_choice needs tools; give some, or leave it out", field="tool_choice")
        if not isinstance(choice, dict) and choice not in ("auto", "required"):
            raise InvalidRequest(
                f"tool_choice is {quoted(str(choice))}; it must be none, auto, required, or a function among tools",
                field="tool_choice",
            )
        if isinstance(choice, dict):
            _check_named(choice, tools)
        return given

    @property
    def most_tokens_name(self) -> str:
        """See `GeneratingRequest`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def most_tokens(self) -> int | None:
        """See `GeneratingRequest`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_logprobs(self) -> int | None:
        """See `GeneratingRequest`."""
        return (self.top_logprobs_ or 0) if self.logprobs else None

    @property
    def adds_special_tokens(self) -> bool:
        """See `GeneratingRequest`."""
        return self.add_special_tokens

    @property
    def echoed_logprobs(self) -> int | None:
        """See `GeneratingRequest`."""
        return self.top_logprobs_ if self.echo else None

    @property
    def role(self) -> str:
        """Whose turn the output is."""
        return "assistant" if self.add_generation_prompt else self.messages_[-1].role

    @property
    def echoed(self) -> str:
        """The text that precedes the output."""
        last = self.messages_[-1]
        text = last.text("messages") if self.echo and last.role == self.role else ""
        return text if isinstance(text, str) else "\n".join(text)

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The conversation as messages for chat templates."""
        return turns(self.messages_, to_be_continued=bool(self.continue_final_message))

    def variables(self, *, excludes_tools: bool) -> dict[str, Any]:
        """Return further variables for the chat template; `excludes_tools`: no tools where none may be called."""
        tools = None
        if self.tools and not (excludes_tools and self.tool_choice == "none"):
            tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return template_variables(self.chat_template, self.chat_template_kwargs, tools=tools, documents=self.documents)

    def form(self, tool_call_probability: float) -> Form | None:
        """See `GeneratingRequest`; a required call precedes other forms."""
        tools = None if self.tools is None else [tool.model_dump() for tool in self.tools]
        choice = self.tool_choice
        named = choice.model_dump() if isinstance(choice, ToolChoice) else choice
        functions, called = openai_choice(openai_functions(tools), named)
        return with_tools(
            super().form(tool_call_probability),
            functions,
            called,
            several=self.parallel_tool_calls is not False,
            probability=tool_call_probability,
        )

    def check(self) -> None:
        """See `GeneratingRequest`."""
        super().check()
        if not self.messages_:
            raise InvalidRequest("messages is empty; give at least one", field="messages")
        for name in ("media_io_kwargs", "mm_processor_kwargs"):
            if value := getattr(self, name):
                raise refused(name, value, "the mock model reads text only")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message ends the prompt within a turn, and add_generation_prompt begins one; set one of"
                " them",
                field="continue_final_message",
            )
        form = self.structured_outputs
        is_text = form is not None and {"json", "regex", "choice"} & {*form.asked}
        if is_text and not isinstance(self.tool_choice, str):
            raise InvalidRequest(
                "structured_outputs and tool_choice are two forms of one output; ask for one", field="tool_choice"
            )


class ChatBatchRequest(ChatRequest):
    """The body of `/v1/chat/completions/batch`: several conversations."""

    messages_: Annotated[
        list[Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]],
        Field(alias="messages", min_length=1, fail_fast=True),
    ]  # type: ignore[assignment]
    tool_choice: Literal["none"] | None = "none"

    @model_validator(mode="before")
    @classmethod
    def _check_batch(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        if given.get("n", 1) not in (None, 1):
            raise InvalidRequest("n must be 1 in a batch; send more conversations", field="n", value=given["n"])
        ignored = ("stream", "stream_options", "tools" if given.get("tools") else "")
        return {name: value for name, value in given.items() if name not in ignored}

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        """The conversations as messages for chat templates."""
        every: Any = self.messages_
        return [turns(messages) for messages in every]

    @property
    def role(self) -> str:
        """See `ChatRequest`."""
        return "assistant"

    @property
    def echoed(self) -> str:
        """See `ChatRequest`."""
        return ""


def _check_named(choice: dict[str, Any], tools: object) -> None:
    """Check a choice that names a tool; its further form is checked later.

    Raises:
        InvalidRequest: it names none, or none of `tools`.
    """
    function, field = choice.get("function"), "tool_choice.function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"{field} is missing, or no object; give the name of a function", field=field)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field}.name is missing, or no text; name a function", field=f"{field}.name")
    known = (tool.get("function") for tool in tools if isinstance(tool, dict)) if isinstance(tools, list) else ()
    if name not in (one.get("name") for one in known if isinstance(one, dict)):
        raise InvalidRequest(f"tool_choice names {quoted(name)}, which is not among tools", field="tool_choice")
