"""The schema of an output that calls tools."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from lorrery.router.edges.structured_output.drawing import SharedConstraint
from lorrery.router.http.forms import Function, with_tools

ITEM = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
PARAMETERS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"item": {"$ref": "#/$defs/Item"}}, "required": ["item"], "$defs": {"Item": ITEM}},
    {"properties": {"item": {"$ref": "/definitions/Item"}}, "required": ["item"], "definitions": {"Item": ITEM}},
    {
        "properties": {"default": {"$ref": "#/$defs/Item"}, "enum": {"$ref": "#/$defs/Item"}},
        "required": ["default", "enum"],
    }
    | {"$defs": {"Item": ITEM}},
    {"properties": {"a": {"const": {"$ref": "#/x"}}, "$ref": {"type": "null"}}, "required": ["a", "$ref"]},
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
    {},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda schema: json.dumps(schema)[:50])
def test_arguments_fit_their_own_schema_wherever_it_stands(parameters: dict[str, Any]) -> None:
    functions = [Function("other", {"type": "null"}), Function("look", parameters), Function("none", None)]
    valid = json.loads(json.dumps(parameters).replace('"/definitions', '"#/definitions'))
    for choice in ("required", functions[1]):
        form = with_tools(None, functions, choice, several=True, probability=0)
        assert form is not None
        shared = SharedConstraint(form.constraint)
        for seed in range(30):
            drawn = json.loads(shared.draw(seed) or "")
            calls = drawn if choice == "required" else [{"name": "look", "parameters": drawn}]
            for call in calls:
                assert call["name"] in ("look", "none")  # the other one takes no object
                if call["name"] == "look":
                    Draft202012Validator(valid).validate(call["parameters"])
                else:
                    assert call["parameters"] == {}
