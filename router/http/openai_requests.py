"""The bodies of OpenAI's routes. The fields that all of them share are in generating.py."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from lorrery.chassis.errors import InvalidRequest
from lorrery.chassis.names import quoted
from lorrery.router.http.blocks import OPENAI_TEXTS
from lorrery.router.http.forms import Form, openai_choice, openai_functions, with_tools
from lorrery.router.http.generating import (
    LENIENT,
    Count,
    GeneratingRequest,
    Positive,
    Switch,
    Texts,
    Tokens,
    Whole,
    refused,
)
from lorrery.router.http.tool_calls import read_calls

_OWN_VARIABLES = ("self", "messages", "add_generation_prompt", "continue_final_message")
"""Variables of the chat template that have fields of their own, which take precedence."""


class CompletionRequest(GeneratingRequest):
    """The body of `/v1/completions`."""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    max_tokens: Count | None = Field(default=None, description="16 if unset; 0 only with echo")
    echo: Switch | None = Field(default=None, description="the text begins with the prompt")
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = Field(
        default=None, description="how likely each token was, with so many alternatives"
    )

    @property
    def echoes_only(self) -> bool:
        """Whether only the prompt is wanted back, without output."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def most_tokens(self) -> int | None:
        """See `GeneratingRequest`: computing a prompt always gives one output token, wanted or not."""
        return 1 if self.echoes_only else self.max_tokens

    @property
    def top_logprobs(self) -> int | None:
        """See `GeneratingRequest`."""
        return self.logprobs

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
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens is 0; it must be at least 1 without echo", field="max_tokens", value=0)
        if not self.prompts:
            raise InvalidRequest("prompt is empty; give text or tokens", field="prompt")


class ContentPart(BaseModel):
    """A part of a message."""

    model_config = LENIENT

    type: str = Field(description="text, refusal or thinking; input_text and output_text are text")
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    def check(self, field: str) -> str:
        """Return the text; `field`: its name, for errors.

        Raises:
            InvalidRequest: it is not text.
        """
        if self.type not in OPENAI_TEXTS:
            raise InvalidRequest(
                f"{field} is of type {quoted(self.type)}, and the mock model reads text only; leave out images, audio"
                " and files",
                field=field,
                value=quoted(self.type),
            )
        name = OPENAI_TEXTS[self.type]
        text: str | None = getattr(self, name)
        if text is None:
            raise InvalidRequest(f"{field}.{name}: Field required", field=f"{field}.{name}")
        return text


class ChatMessage(BaseModel):
    """One turn of a conversation; the chat template may read further fields."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: str
    content: str | Annotated[list[ContentPart | str], Field(fail_fast=True)] | None = None

    def text(self, field: str) -> str:
        """Return the text; `field`: its name, for errors.

        Raises:
            InvalidRequest: a part of it is not text.
        """
        if not isinstance(self.content, list):
            return self.content or ""
        return "".join(
            part if isinstance(part, str) else part.check(f"{field}.content[{number}]")
            for number, part in enumerate(self.content)
        )

    def turn(self, where: str) -> dict[str, Any]:
        """Return the turn as a message for chat templates, without fields that are null; `where`: for errors.

        Raises:
            InvalidRequest: it has more than text and tool calls.
        """
        further = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        calls = further.pop("tool_calls", None)
        turn = {**further, "role": self.role, "content": self.text(where)}
        if self.role != "assistant" or not calls:
            return turn
        return {**turn, "tool_calls": read_calls(calls, f"{where}.tool_calls")}


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
    return [message.turn(f"messages[{number}]") for number, message in enumerate(messages)]


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

    messages_: Annotated[list[ChatMessage], Field(min_length=1, alias="messages", fail_fast=True)]
    max_completion_tokens: Positive | None = Field(default=None, description="unset: max_tokens")
    max_tokens: Positive | None = Field(default=None, description="unset: what the prompt leaves of the context")
    logprobs: Switch | None = Field(default=None, description="how likely each token was")
    top_logprobs_: Annotated[Whole, Field(ge=0, le=20)] | None = Field(
        default=None, alias="top_logprobs", description="so many alternatives to each token; needs logprobs"
    )
    modalities: Texts | None = Field(default=None, description="text")
    tools: Any = Field(default=None, description="functions that may be called, also for the chat template")
    parallel_tool_calls: Switch | None = Field(default=None, description="false: one call at most")
    documents: Any = Field(default=None, description="for the chat template")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="for the chat template")
    add_generation_prompt: Switch | None = Field(
        default=None, description="whether the prompt ends with what begins the assistant's turn"
    )
    chat_template: str | None = None
    continue_final_message: Switch | None = Field(
        default=None, description="whether the prompt ends with the content of the last message; instead of that"
    )
    tool_choice: Any = Field(default=None, description="none, auto, required, or a function to call")

    fills_context: ClassVar[bool] = True

    @property
    def most_tokens(self) -> int | None:
        """See `GeneratingRequest`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs(self) -> int | None:
        """See `GeneratingRequest`."""
        return (self.top_logprobs_ or 0) if self.logprobs else None

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The conversation as messages for chat templates."""
        return turns(self.messages_, to_be_continued=bool(self.continue_final_message))

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables for the chat template."""
        return template_variables(
            self.chat_template,
            self.chat_template_kwargs,
            tools=None if self.tool_choice == "none" else self.tools,
            documents=self.documents,
        )

    def form(self, tool_call_probability: float) -> Form | None:
        """See `GeneratingRequest`; a required call precedes other forms."""
        functions, choice = openai_choice(openai_functions(self.tools), self.tool_choice)
        return with_tools(
            super().form(tool_call_probability),
            functions,
            choice,
            several=self.parallel_tool_calls is not False,
            probability=tool_call_probability,
        )

    def check(self) -> None:
        """See `GeneratingRequest`."""
        super().check()
        if self.top_logprobs_ and not self.logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs_}; it needs logprobs: true; set that, or leave it out",
                field="top_logprobs",
                value=self.top_logprobs_,
            )
        if self.modalities is not None and set(self.modalities) != {"text"}:
            raise refused("modalities", self.modalities, "output is text")
