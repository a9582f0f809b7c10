"""The form that a request asks of its output: structured outputs, and calls of tools."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lorrery.router.edges.structured_output.keywords import Json
from lorrery.router.field_names import Names
from lorrery.service.errors import InvalidRequest
from lorrery.service.names import quoted
from lorrery.v1 import router_pb2

_NO_GRAMMAR = "the mock model follows schemas, patterns and choices, and no grammar"
_DATA = ("const", "enum", "default", "examples")
"""Keywords of a schema whose values are no schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name, and the names no keywords."""
_MOST_CALLS = 2
"""Calls in one output, where a client allows several."""


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: one kind, and how it is to be written."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> "StructuredOutputs":
        asked = self.asked
        if len(asked) != 1:
            kinds = " and ".join(asked) or "no kind"
            raise InvalidRequest(
                f"structured_outputs has {kinds}; give one of json, regex, choice and json_object",
                field="structured_outputs",
            )
        return self

    @property
    def asked(self) -> dict[str, Any]:
        """The kinds that are given."""
        kinds = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = {name.rstrip("_"): getattr(self, name) for name in kinds}
        return {name: value for name, value in given.items() if value is not None}


class Form(NamedTuple):
    """What an output is to be.

    Attributes:
        constraint: for the handler.
        field: the request's field that asks for it, for errors.
        calls_tools: whether the output is calls of tools.
        tool: the one whose arguments the output is; None: the output names it.
        is_auto: whether it may also be text, so that a parser of tool calls reads it.
        parsed: called each time that this parser has read some output, with whether it found part of a call.
    """

    constraint: router_pb2.Constraint
    field: str
    calls_tools: bool = False
    tool: str | None = None
    is_auto: bool = False
    parsed: Callable[[bool], None] = lambda called: None

    def names(self, names: Names) -> Names:
        """Return the names for errors, with that of the field."""
        forms = (f"constraint.{form.name}" for form in router_pb2.Constraint.DESCRIPTOR.fields)
        return names._replace(words={**names.words, **dict.fromkeys(forms, self.field)})


class Function(NamedTuple):
    """A tool that a model may call.

    Attributes:
        name: of the tool.
        parameters: the schema of its arguments; None: it has none.
    """

    name: str
    parameters: Any


def json_schema(schema: object, field: str) -> Form:
    """Return the form of JSON under a schema, given as such or as JSON."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Form(router_pb2.Constraint(json_schema=text), field)


def of_format(given: Mapping[str, Any] | None, field: str, within: str = "") -> Form | None:
    """Return the form that OpenAI's `response_format` or `text.format` asks for, or Anthropic's `output_config.format`.

    Args:
        given: its type, and what belongs to that.
        field: its name, for errors.
        within: the field of it that holds the schema; empty: it does itself.

    Raises:
        InvalidRequest: it is malformed, or of an unknown type.
    """
    kind = "text" if given is None else given.get("type", "text")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return Form(router_pb2.Constraint(json_object=True), field)
    if kind == "json_schema":
        holder = given.get(within) if within else given
        schema = holder.get("schema") if isinstance(holder, dict) else None
        path = f"{within}.schema" if within else "schema"
        if schema is None:
            raise InvalidRequest(f"{field} has no {path}; give one", field=f"{field}.{path}")
        return json_schema(schema, f"{field}.{path}")
    raise InvalidRequest(
        f"{field}.type is {quoted(str(kind))}; it must be text, json_object or json_schema",
        field=field,
        value=quoted(str(kind)),
    )


def of_mock_output(text: str | None) -> Form | None:
    """Return the form of an output that is given word for word."""
    return None if text is None else Form(router_pb2.Constraint(text=text), "mock_output")


def of_structured_outputs(given: StructuredOutputs | None) -> Form | None:
    """Return the form that vLLM's `structured_outputs` asks for.

    Raises:
        InvalidRequest: it is one that is not supported.
    """
    if given is None:
        return None
    ((kind, value),) = given.asked.items()
    field = f"structured_outputs.{kind}"
    if kind == "json":
        return json_schema(value, field)
    if kind == "regex":
        return Form(router_pb2.Constraint(regex=value), field)
    if kind == "choice":
        if not value:
            raise InvalidRequest(f"{field} is empty; give at least one text", field=field)
        return Form(router_pb2.Constraint(choices=router_pb2.Choices(texts=value)), field)
    if kind == "json_object":
        if not value:
            raise InvalidRequest(f"{field} is false; set it to true, or leave structured_outputs out", field=field)
        return Form(router_pb2.Constraint(json_object=True), field)
    raise InvalidRequest(f"{field} is not supported here: {_NO_GRAMMAR}", field="structured_outputs")


def only_one(forms: Iterable[Form | None]) -> Form | None:
    """Return the form that a request asks for.

    Raises:
        InvalidRequest: there are several.
    """
    asked = [form for form in forms if form is not None]
    if len(asked) > 1:
        raise InvalidRequest(
            f"{asked[0].field} and {asked[1].field} are two forms of one output; ask for one", field=asked[1].field
        )
    return asked[0] if asked else None


def with_tools(
    form: Form | None, functions: Sequence[Function], choice: object, *, several: bool, probability: float
) -> Form | None:
    """Return the form of an output that may call tools.

    A call that a client requires precedes any other form. Where a model is free to call, another form precedes a call,
    as in engines, whose grammars are about the whole output. One that the client gives is read as calls in any case.

    Args:
        form: what else is asked for; None: nothing.
        functions: that may be called.
        choice: `required`, `auto` or `none`, or the one to call; None: auto.
        several: whether an output may call more than one.
        probability: with which an output calls tools under `auto`.

    Raises:
        InvalidRequest: the choice is none of these, or a call is required and there is nothing to call.
    """
    if isinstance(choice, Function):
        called = json_schema(_arguments(choice, ""), "tools")
        return (form if is_given(form) else called)._replace(calls_tools=True, tool=choice.name)
    if choice not in (None, "auto", "none", "required"):
        raise InvalidRequest(
            f"tool_choice is {json.dumps(choice)[:100]}; it must be none, auto, required, or a function among tools",
            field="tool_choice",
        )
    if choice == "required" and not functions:
        raise InvalidRequest("tool_choice requires a call, and tools has no function; give one", field="tool_choice")
    if choice == "none" or not functions:
        return form
    if is_given(form):
        return form._replace(calls_tools=True, is_auto=choice != "required")
    if choice != "required" and (form is not None or not probability):
        return form
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "parameters": _arguments(function, f"/items/anyOf/{number}/properties/parameters"),
            },
            "required": ["name", "parameters"],
        }
        for number, function in enumerate(functions)
    ]
    most = _MOST_CALLS if several else 1
    called = json_schema({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}, "tools")
    if choice != "required":
        called.constraint.probability = probability
    return called._replace(calls_tools=True, is_auto=choice != "required")


def is_given(form: Form | None) -> TypeGuard[Form]:
    """Return whether a form is an output, word for word."""
    return form is not None and form.constraint.HasField("text")


def _arguments(function: Function, at: str) -> dict[str, Any]:
    """Return the schema of a function's arguments, always an object; `at`: its place in the whole schema."""
    given = function.parameters
    schema = given if isinstance(given, dict) and given else {}
    return {"allOf": [{"type": "object"}, _moved(schema, f"{at}/allOf/1")]}


def chosen(functions: Sequence[Function], name: object, field: str) -> Function:
    """Return the function that a client wants to be called.

    Raises:
        InvalidRequest: there is none of this name.
    """
    found = next((function for function in functions if function.name == name), None)
    if name is None:
        raise InvalidRequest(f"{field} is missing; name a function", field=field)
    if found is None:
        raise InvalidRequest(f"{field} is {quoted(str(name))}, which is not among tools; add it there", field=field)
    return found


def openai_choice(functions: list[Function], choice: object) -> tuple[list[Function], object]:
    """Return the functions that may be called, and the choice among them, of OpenAI's routes.

    Args:
        functions: that the request offers.
        choice: `tool_choice`, whose objects have their fields in one named like their type, or beside it.

    Raises:
        InvalidRequest: it names a function that there is not.
    """
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "allowed_tools"):
        return functions, choice
    kind = choice["type"]
    named, prefix = (choice[kind], f"{kind}.") if isinstance(choice.get(kind), dict) else (choice, "")
    if kind == "function":
        return functions, chosen(functions, named.get("name"), f"tool_choice.{prefix}name")
    allowed = [
        chosen(functions, function.name, f"tool_choice.{prefix}tools")
        for function in openai_functions(named.get("tools"))
    ]
    return allowed, named.get("mode")


def openai_functions(tools: object) -> list[Function]:
    """Return the functions among tools, as OpenAI's routes have them; others are left out.

    Args:
        tools: each with its function's fields in `function`, or beside `type`.
    """
    found: list[Function] = []
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type", "function") == "function":
            function = tool.get("function", tool)
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                found.append(Function(function["name"], function.get("parameters")))
    return found


def _moved(schema: Json, to: str) -> Json:
    """Return a schema that is to be at place `to` of another one: its references into itself point there."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: {name: _moved(part, to) for name, part in value.items()}
        if key in _NAMED and isinstance(value, dict)
        else value
        if key in _DATA
        else _moved(value, to)
        for key, value in schema.items()
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith(("#", "/")):
        moved["$ref"] = f"#{to}{reference.removeprefix('#')}"
    return moved
