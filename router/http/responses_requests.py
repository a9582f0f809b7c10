"""The body of OpenAI's `/v1/responses`. Fields shared with the other routes are in generating.py."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.http.blocks import OPENAI_TEXTS, Block, Content, text_of, unread
from lorrery.router.http.forms import Form, of_format, only_one, openai_choice, openai_functions, with_tools
from lorrery.router.http.generating import (
    LENIENT,
    GeneratingRequest,
    Texts,
    refuse_given,
    refused,
)
from lorrery.router.http.tool_calls import read_arguments

Switch = Annotated[bool, Field(strict=False)]
Whole = Annotated[int, Field(strict=False)]
Positive = Annotated[Whole, Field(ge=1, le=0x7FFFFFFF)]

_ITEMS = ("message", "function_call", "function_call_output")
_UNREAD_ITEMS = ("reasoning",)
"""Models do not read their reasoning from earlier turns."""

_REFUSED = {
    "background": "responses are not kept; leave it out, and stream",
    "previous_response_id": "responses are not kept; send the conversation as input, with store false",
    "conversation": "conversations are not kept; send this one as input",
    "prompt": "prompts are not kept; send it as instructions and input",
    "n": "a response is one output; send several requests, or use /v1/chat/completions",
    "prompt_logprobs": "a response has none; use /v1/chat/completions",
    "top_logprobs_": "a response has none; use /v1/chat/completions",
    "return_token_ids": "a response has none; use /v1/chat/completions",
}


class InputItem(BaseModel):
    """What has been said, or a tool's call and its output; further fields depend on the type."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    type: str = "message"
    role: str | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None

    def turns(self, where: str) -> Iterator[dict[str, Any]]:
        """Yield the item as messages for chat templates; nothing if templates do not read it.

        Raises:
            InvalidRequest: it is of a kind that cannot be read.
        """
        if self.type in _UNREAD_ITEMS:
            return
        if self.type == "message":
            if self.role is None:
                raise InvalidRequest(f"{where}.role is missing; say user, assistant or system", field=f"{where}.role")
            yield {"role": self.role, "content": text_of(self.content, f"{where}.content", OPENAI_TEXTS)}
        elif self.type == "function_call":
            call = {"name": self.name or "", "arguments": read_arguments(self.arguments, f"{where}.arguments")}
            calls = [{"id": self.call_id or "", "type": "function", "function": call}]
            yield {"role": "assistant", "content": "", "tool_calls": calls}
        elif self.type == "function_call_output":
            said = text_of(self.output, f"{where}.output", OPENAI_TEXTS)
            yield {"role": "tool", "content": said, "tool_call_id": self.call_id or ""}
        else:
            raise unread(self.type, where, _ITEMS)


class TextFormat(BaseModel):
    """What kind of text is asked for."""

    model_config = LENIENT

    format: Block | None = Field(default=None, description="type json_schema with schema, json_object, or text")


class ResponsesRequest(GeneratingRequest):
    """The body of `/v1/responses`."""

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = Field(default=None, description="what the conversation begins with")
    max_output_tokens: Positive | None = Field(default=None, description="unset: what the prompt leaves of the context")
    text: TextFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        default=None, description="functions that may be called, also for the chat template"
    )
    tool_choice: Any = Field(default=None, description="none, auto, required, or a function to call")
    parallel_tool_calls: Switch | None = Field(default=None, description="false: one call at most")
    include: Texts | None = None
    top_logprobs_: Annotated[Whole, Field(ge=0, le=20)] | None = Field(default=None, alias="top_logprobs")
    metadata: dict[str, Any] | None = None
    background: Switch | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def most_tokens_name(self) -> str:
        """See `GeneratingRequest`."""
        return "max_output_tokens"

    @property
    def most_tokens(self) -> int | None:
        """See `GeneratingRequest`."""
        return self.max_output_tokens

    @property
    def top_logprobs(self) -> int | None:
        """See `GeneratingRequest`."""
        return None

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables for the chat template."""
        return {"tools": self.tools} if self.tools and self.tool_choice != "none" else {}

    def turns(self) -> list[dict[str, Any]]:
        """Return the conversation as messages for chat templates.

        Raises:
            InvalidRequest: it has more than text.
        """
        found = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            found.extend(item.turns(f"input[{number}]"))
        return found

    def form(self, tool_call_probability: float) -> Form | None:
        """See `GeneratingRequest`; a required call precedes other forms."""
        functions, choice = openai_choice(openai_functions(self.tools), self.tool_choice)
        return with_tools(
            only_one([super().form(tool_call_probability), of_format(self.text_format, "text.format")]),
            functions,
            choice,
            several=self.parallel_tool_calls is not False,
            probability=tool_call_probability,
        )

    @property
    def text_format(self) -> dict[str, Any] | None:
        """What kind of text it asks for; None: any."""
        return (
            None if self.text is None or self.text.format is None else self.text.format.model_dump(exclude_unset=True)
        )

    def check(self) -> None:
        """See `GeneratingRequest`."""
        super().check()
        refuse_given(self, _REFUSED)
        if "message.output_text.logprobs" in (self.include or ()):
            raise refused(
                "include", "message.output_text.logprobs", "a response has none; use logprobs of /v1/chat/completions"
            )
