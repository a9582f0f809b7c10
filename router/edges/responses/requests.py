"""The body of OpenAI's `/v1/responses`, with the fields, types and bounds of vLLM 0.32.

vLLM's own model is in vllm/entrypoints/openai/responses/protocol.py. What is generated for a response is asked for as a
chat is (openai_requests.py), so that its parameters are checked and have effect as there.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from lorrery.router.edges.as_chat import as_chat
from lorrery.router.edges.responses.items import InputItem, is_to_be_continued, turns
from lorrery.router.edges.responses.tools import (
    Called,
    Choice,
    ChosenAmong,
    ChosenByName,
    ResponseFormatTextJSONSchemaConfig,
    TextConfig,
    Tool,
    callable_tools,
    in_full,
)
from lorrery.router.http.forms import Form, Function, StructuredOutputs, openai_choice, with_tools
from lorrery.router.http.generating import LENIENT, Arguments, Bias, Int64, NullIsZero, Options, Stop, Tokens
from lorrery.router.http.openai_requests import ChatRequest
from lorrery.service.errors import InvalidRequest
from lorrery.service.names import cut

_LOGPROBS = "message.output_text.logprobs"
_GENERATION = (
    *("model", "stream", "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
    *("media_io_kwargs", "mm_processor_kwargs", "chat_template_kwargs", "mock_output", "user"),
)
"""Fields that mean what they mean in a chat."""


class ReasoningConfig(BaseModel):
    """How a model is to think; without effect."""

    model_config = {"extra": "allow"}

    context: Literal["auto", "current_turn", "all_turns"] | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(BaseModel):
    """The body of `/v1/responses`."""

    model_config = LENIENT

    background: bool | None = False
    include: (
        Annotated[
            list[
                Literal[
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                    "file_search_call.results",
                    "message.input_image.image_url",
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                ]
            ],
            Field(fail_fast=True),
        ]
        | None
    ) = None
    input: str | Annotated[list[InputItem], Field(fail_fast=True)]
    instructions: str | None = Field(default=None, description="what the conversation begins with")
    max_output_tokens: int | None = Field(default=None, description="unset: what the prompt leaves of the context")
    max_tool_calls: int | None = Field(default=None, description="without effect")
    metadata: Annotated[dict[str, str], Field(fail_fast=True)] | None = None
    model: str | None = Field(default=None, description="the base model, or an adapter; unset: the base model")
    logit_bias: Bias | None = Field(default=None, description="without effect")
    parallel_tool_calls: bool | None = Field(default=True, description="false: one call at most")
    previous_response_id: str | None = Field(default=None, description="responses are not kept")
    reasoning: ReasoningConfig | None = None
    include_reasoning: bool = Field(default=True, description="without effect")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = Field(default=True, description="responses are not kept in any case")
    stream: bool | None = False
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Choice = "auto"
    tools: Annotated[list[Tool], Field(fail_fast=True)] = []
    top_logprobs: NullIsZero = Field(default=0, description=f"alternatives to each token; needs {_LOGPROBS} in include")
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0 and -1: all tokens")
    min_p: float | None = Field(default=None, description="without effect")
    truncation: Literal["auto", "disabled"] | None = Field(
        default="disabled", description="auto: the first tokens of a prompt count, as many as there may be"
    )
    user: str | None = Field(default=None, description="the tenant, where no API keys are asked for")
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    prompt_cache_key: str | None = Field(default=None, description="without effect")
    watermarking: bool | None = Field(default=None, description="without effect")
    request_id: str = Field(default="", description="the response's id; unset: of the server's making")
    session_id: str | None = Field(default=None, description="without effect")
    media_io_kwargs: Options | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    priority: Int64 = Field(default=0, description="a lower one is earlier, if scheduler.policy is priority")
    mm_payload: Literal["tensors", "none"] = Field(default="tensors", description="without effect")
    return_mm_kwargs: bool | None = Field(default=None, description="without effect")
    cache_salt: Any = Field(default=None, description="text; see the chat's")
    enable_response_messages: bool = Field(
        default=False, description="the response has its prompt and output as tokens"
    )
    previous_input_messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        default=None, description="without effect"
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="json (a schema), json_object, regex or choice: the form of the output"
    )
    repetition_penalty: float | None = Field(default=None, description="without effect")
    seed: Int64 | None = None
    stop: Stop = []
    stop_token_ids: Tokens | None = Field(default=[], description="the output ends with the first of these")
    ignore_eos: bool = False
    vllm_xargs: Arguments | None = Field(default=None, description="without effect")
    kv_transfer_params: dict[str, Any] | None = Field(default=None, description="without effect")
    ec_transfer_params: dict[str, Any] | None = Field(default=None, description="without effect")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="for the chat template")
    mock_output: str | None = Field(default=None, description="what the mock model says, word for word")

    @model_validator(mode="before")
    @classmethod
    def _check_as_given(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        given = _with_choice(given)
        for tool in given.get("tools") or ():
            form = tool.get("format") if isinstance(tool, dict) and tool.get("type") == "custom" else None
            if isinstance(form, dict) and form.get("type") == "grammar":
                raise InvalidRequest("tools has one whose text has a grammar; leave its format out", field="tools")
        if isinstance(given.get("input"), dict):
            given = {**given, "input": list(given["input"])}
        if given.get("prompt") is not None:
            raise InvalidRequest("prompts are not kept; send it as instructions and input", field="prompt")
        if given.get("background") and not given.get("store", True):
            raise InvalidRequest("background needs store to be true; leave one of them out", field="background")
        return given

    def check_room(self, max_model_len: int) -> None:
        """Check that its output is within the context; what the prompt leaves of that is another matter.

        Raises:
            InvalidRequest: it is not.
        """
        count = self.max_output_tokens
        if count is not None and count > max_model_len:
            raise InvalidRequest(
                f"max_output_tokens={cut(str(count))} cannot be greater than max_model_len={max_model_len}",
                field="max_output_tokens",
                value=count,
                limit=max_model_len,
            )

    def turns(self) -> list[dict[str, Any]]:
        """Return the conversation as messages for chat templates.

        Raises:
            InvalidRequest: it has more than text and calls of tools.
        """
        found = [{"role": "system", "content": self.instructions}] if self.instructions else []
        said = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else turns(self.input)
        return [*found, *said]

    @property
    def is_continuing(self) -> bool:
        """Whether the output continues the last item."""
        return not isinstance(self.input, str) and is_to_be_continued(self.input)

    @property
    def top_logprobs_shown(self) -> int | None:
        """Number of alternatives to each token; None: no log-probabilities."""
        return self.top_logprobs if _LOGPROBS in (self.include or ()) else None

    def chat(self) -> ChatRequest:
        """Return what is to be generated, as a chat without its conversation.

        Raises:
            InvalidRequest: it asks for two forms of its output, or has a value that no chat may have.
        """
        for name in ("background", "truncation"):
            if getattr(self, name) is None:
                raise InvalidRequest(f"{name} is null, which its response cannot repeat; leave it out")
        given = {name: getattr(self, name) for name in _GENERATION} | {"max_tokens": self.max_output_tokens}
        given["stop"] = self.stop or None  # an empty text is none here
        if self.top_logprobs_shown is not None:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        tools = [{"type": "function", "function": function._asdict()} for _, function in self._functions]
        if tools:
            given |= {"tools": tools, "tool_choice": "none"}
        if self.reasoning is not None:
            given["reasoning_effort"] = self.reasoning.effort
        wanted = None if self.text is None else self.text.format
        if wanted is not None and self.structured_outputs is not None:
            raise InvalidRequest(
                "structured_outputs and text.format are two forms of one output; ask for one",
                field="structured_outputs",
            )
        if isinstance(wanted, ResponseFormatTextJSONSchemaConfig):
            schema = {"name": wanted.name, "schema": wanted.schema_}
            given["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif wanted is not None:
            given["response_format"] = {"type": wanted.type}
        chat = as_chat(given)
        chat.structured_outputs = self.structured_outputs
        return chat

    @property
    def _functions(self) -> list[tuple[Called, Function]]:
        return list(callable_tools(self.tools))

    @property
    def called(self) -> dict[str, Called]:
        """The tools that can be called, by the names that models use."""
        return {function.name: called for called, function in self._functions}

    def form(self, chat: ChatRequest, tool_calls: str, tool_call_probability: float) -> Form | None:
        """Return the form of the output; a required call precedes other forms. None: any.

        Args:
            chat: what is to be generated.
            tool_calls: `none`, `required`, or `auto`: which calls an engine reads, see `router.tool_calls`. Others are
                text, as in vLLM.
            tool_call_probability: with which an output calls tools where it may and need not.

        Raises:
            InvalidRequest: it asks for a form that is not supported.
        """
        form = chat.form(0)
        functions, choice = openai_choice([function for _, function in self._functions], self._choice())
        if tool_calls == "none" or (tool_calls == "required" and choice == "auto"):
            return form
        return with_tools(
            form,
            functions,
            choice,
            several=self.parallel_tool_calls is not False,
            probability=tool_call_probability,
        )

    def _choice(self) -> object:
        if isinstance(self.tool_choice, str):
            return self.tool_choice
        if isinstance(self.tool_choice, ChosenAmong):
            return self.tool_choice.model_dump()
        if isinstance(self.tool_choice, ChosenByName):
            return {"type": "function", "name": self.tool_choice.name}
        return "none"  # a tool of OpenAI's servers


def _with_choice(given: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the choice among its tools that vLLM reads from it.

    Raises:
        InvalidRequest: it chooses a tool that is not there.
    """
    tools, choice = given.get("tools"), given.get("tool_choice", "auto")
    if isinstance(tools, bool | int | float):
        raise InvalidRequest(f"tools is {cut(str(tools))}; give a list, or leave it out")
    is_named = isinstance(choice, dict) and choice.get("type") in ("function", "custom")
    if not tools:
        if choice in ("auto", "none"):
            return {**given, "tool_choice": "none"}
        if is_named or choice == "required":
            raise InvalidRequest("tool_choice asks for a call, and there are no tools; give some", field="tool_choice")
    elif is_named:
        name = choice.get("name")
        if not name or not isinstance(tools, list):
            raise InvalidRequest("tool_choice has no name of a tool; give one", field="tool_choice")
        return {**given, "tool_choice": {**choice, "name": in_full(name, tools)}}
    return given
