"""The tools of `/v1/responses`, the choice among them, and the form of its text.

Types and fields are those of OpenAI's Python package (openai.types.responses), which vLLM 0.32 reads and shows. Only
functions, also those of a namespace, and custom tools can be called; vLLM shows the others to nobody either.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lorrery.router.http.forms import Function
from lorrery.service.errors import InvalidRequest
from lorrery.service.names import quoted

_CONFIG = ConfigDict(extra="allow", protected_namespaces=())
Callers = Annotated[list[Literal["direct", "programmatic"]], Field(fail_fast=True)]
_CUSTOM_INPUT = "input"
_CUSTOM_SCHEMA = {"type": "object", "properties": {_CUSTOM_INPUT: {"type": "string"}}, "required": [_CUSTOM_INPUT]}
"""How a model is shown a tool that takes text: as a function of one text."""


class FunctionTool(BaseModel):
    """A function that may be called."""

    model_config = _CONFIG

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    type: Literal["function"]
    allowed_callers: Callers | None = None
    async_: bool | None = Field(default=None, alias="async")
    defer_loading: bool | None = None
    description: str | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(BaseModel):
    """A tool that takes text."""

    model_config = _CONFIG

    name: str
    type: Literal["custom"]
    allowed_callers: Callers | None = None
    async_: bool | None = Field(default=None, alias="async")
    defer_loading: bool | None = None
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(BaseModel):
    """Tools under a common name."""

    model_config = _CONFIG

    description: str
    name: str
    tools: Annotated[list[FunctionTool | CustomTool], Field(fail_fast=True)]
    type: Literal["namespace"]


class _Hosted(NamedTuple):
    """A kind of tool that OpenAI's servers have."""

    required: Sequence[str] = ()
    optional: Sequence[str] = ()


_WEB_SEARCH = _Hosted(optional=("external_web_access", "filters", "search_context_size", "user_location"))
_WEB_SEARCH_PREVIEW = _Hosted(optional=("search_content_types", "search_context_size", "user_location"))
_HOSTED: Mapping[str, _Hosted] = {
    "apply_patch": _Hosted(optional=("allowed_callers",)),
    "code_interpreter": _Hosted(("container",), ("allowed_callers",)),
    "computer": _Hosted(),
    "computer_use_preview": _Hosted(("display_height", "display_width", "environment")),
    "file_search": _Hosted(("vector_store_ids",), ("filters", "max_num_results", "ranking_options")),
    "image_generation": _Hosted(
        optional=(
            *("action", "background", "complexity", "frame_count", "frame_duration_ms", "input_fidelity"),
            *("input_image_mask", "model", "moderation", "output_compression", "output_format", "partial_images"),
            *("quality", "size", "svg"),
        )
    ),
    "local_shell": _Hosted(),
    "mcp": _Hosted(
        ("server_label",),
        (
            *("allowed_callers", "allowed_tools", "authorization", "connector_id", "defer_loading", "headers"),
            *("require_approval", "server_description", "server_url", "tunnel_id"),
        ),
    ),
    "programmatic_tool_calling": _Hosted(),
    "shell": _Hosted(optional=("allowed_callers", "environment")),
    "tool_search": _Hosted(optional=("description", "execution", "parameters")),
    "web_search": _WEB_SEARCH,
    "web_search_2025_08_26": _WEB_SEARCH,
    "web_search_preview": _WEB_SEARCH_PREVIEW,
    "web_search_preview_2025_03_11": _WEB_SEARCH_PREVIEW,
}


class HostedTool(BaseModel):
    """A tool that OpenAI's servers have; it is shown, and cannot be called."""

    model_config = _CONFIG

    type: str

    @model_validator(mode="before")
    @classmethod
    def _with_all_fields(cls, given: object) -> object:
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(given, dict) or not isinstance(kind, str) or kind not in _HOSTED:
            raise ValueError("there are no tools of this type")
        hosted = _HOSTED[kind]
        if missing := next((name for name in hosted.required if given.get(name) is None), None):
            raise ValueError(f"a tool of type {quoted(kind)} has {missing}; give it")
        return dict.fromkeys(hosted.optional) | given


Tool = FunctionTool | CustomTool | NamespaceTool | HostedTool


class ChosenAmong(BaseModel):
    """Tools that may be called, out of all."""

    model_config = _CONFIG

    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    type: Literal["allowed_tools"]


class ChosenByName(BaseModel):
    """A tool to call."""

    model_config = _CONFIG

    name: str
    type: Literal["function", "custom"]


class ChosenServer(BaseModel):
    """A server whose tools are to be called."""

    model_config = _CONFIG

    server_label: str
    type: Literal["mcp"]
    name: str | None = None


class ChosenKind(BaseModel):
    """A kind of tool to call."""

    model_config = _CONFIG

    type: Literal[
        "file_search",
        "web_search_preview",
        "computer",
        "computer_use_preview",
        "computer_use",
        "web_search_preview_2025_03_11",
        "image_generation",
        "code_interpreter",
        "programmatic_tool_calling",
        "apply_patch",
        "shell",
    ]


Choice = Literal["none", "auto", "required"] | ChosenAmong | ChosenByName | ChosenServer | ChosenKind


class ResponseFormatText(BaseModel):
    """Any text."""

    model_config = _CONFIG

    type: Literal["text"]


class ResponseFormatTextJSONSchemaConfig(BaseModel):
    """JSON under a schema."""

    model_config = _CONFIG

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    type: Literal["json_schema"]
    description: str | None = None
    strict: bool | None = None


class ResponseFormatJSONObject(BaseModel):
    """Any object in JSON."""

    model_config = _CONFIG

    type: Literal["json_object"]


class TextConfig(BaseModel):
    """What kind of text is asked for."""

    model_config = _CONFIG

    format: ResponseFormatText | ResponseFormatTextJSONSchemaConfig | ResponseFormatJSONObject | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Called(NamedTuple):
    """A tool that can be called, by its owner's name.

    Attributes:
        name: of the tool.
        namespace: that it is in; None: in none.
        is_custom: whether it takes text.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def in_full(self) -> str:
        """The name that models use."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name

    def input_of(self, arguments: str) -> str:
        """Return the text that a tool is called with, out of a function's arguments; these if there is none in them."""
        try:
            given = json.loads(arguments)
        except ValueError:
            return arguments
        text = given.get(_CUSTOM_INPUT) if isinstance(given, dict) else None
        return text if isinstance(text, str) else arguments


def callable_tools(tools: Sequence[Tool]) -> Iterator[tuple[Called, Function]]:
    """Yield the tools that can be called, each with the function that a model is shown."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            for one in tool.tools:
                if isinstance(one, FunctionTool):
                    called = Called(one.name, tool.name)
                    yield called, Function(called.in_full, one.parameters)
        elif isinstance(tool, FunctionTool):
            yield Called(tool.name), Function(tool.name, tool.parameters)
        elif isinstance(tool, CustomTool):
            yield Called(tool.name, is_custom=True), Function(tool.name, _CUSTOM_SCHEMA)


def in_full(name: str, tools: Sequence[Any]) -> str:
    """Return the full name of a tool, which may be called by its name within a namespace if that is unambiguous.

    Args:
        name: as the request has it.
        tools: of the request, as it has them.

    Raises:
        InvalidRequest: there is no such tool, or there are several.
    """
    known, local = set[str](), list[str]()
    for tool in tools:
        if not isinstance(tool, dict):
            continue
        if tool.get("type") != "namespace":
            known.add(str(tool.get("name")))
            continue
        inner = tool.get("tools")
        if not isinstance(inner, list) or not isinstance(tool.get("name"), str):
            return name  # its form is checked later
        names = [str(one.get("name")) for one in inner if isinstance(one, dict)]
        full = {one: Called(one, tool["name"]).in_full for one in names}
        known.update(full.values())
        local.extend(whole for one, whole in full.items() if one == name)
    if name in known:
        return name
    if len(local) == 1:
        return local[0]
    why = f"stands for {' and '.join(local)}; say which" if local else "is not among tools; add it there"
    raise InvalidRequest(f"tool_choice names {quoted(name)}, which {why}", field="tool_choice")
