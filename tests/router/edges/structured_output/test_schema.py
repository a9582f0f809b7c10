"""Drawn values are valid: jsonschema, which shares nothing with the drawing, says so."""

import contextlib
import json
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import extend

from lorrery.router.edges.structured_output.budget import Budget, UnmetError
from lorrery.router.edges.structured_output.drawing import SharedConstraint
from lorrery.router.edges.structured_output.schema import draw
from lorrery.service.errors import InvalidRequest
from lorrery.v1 import router_pb2


def _is_multiple(validator: Any, step: float, value: Any, schema: Any) -> Any:
    """Check exactly: jsonschema divides floating-point numbers, so that 0.3 would be no multiple of 0.1."""
    if validator.is_type(value, "number") and (Fraction(repr(value)) / Fraction(repr(step))).denominator != 1:
        yield from Draft202012Validator.VALIDATORS["multipleOf"](validator, step, value, schema)


VALIDATOR = extend(Draft202012Validator, {"multipleOf": _is_multiple})
FORMATS = Draft202012Validator.FORMAT_CHECKER


def drawn(schema: object, seed: int = 0) -> Any:
    return draw(schema, Random(seed), Budget())


def check(schema: Any, seed: int) -> Any:
    value = drawn(schema, seed)
    again = json.loads(json.dumps(value))
    VALIDATOR(schema, format_checker=FORMATS).validate(again)
    return again


NAMES = st.sampled_from(["a", "b", "c", "d e", "ß"])
SMALL = st.integers(0, 6)
SEEDS = st.integers(0, 2**64 - 1)


def _bounds(low: str, high: str, numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw no bound, one, or two in order."""
    pairs = st.tuples(numbers, numbers).map(sorted)
    return st.one_of(
        st.just({}),
        numbers.map(lambda bound: {low: bound}),
        numbers.map(lambda bound: {high: bound}),
        pairs.map(lambda pair: {low: pair[0], high: pair[1]}),
    )


def _joined(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda found: {key: value for part in found for key, value in part.items()})


FLOATS = st.floats(-1e6, 1e6, allow_nan=False).map(lambda number: round(number, 3))
LEAVES = st.one_of(
    st.sampled_from([True, {}, {"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}]),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.text(max_size=3).map(lambda value: {"const": value}),
    _joined(st.just({"type": "string"}), _bounds("minLength", "maxLength", st.integers(0, 30))),
    st.sampled_from(["date-time", "date", "time", "email", "ipv4", "ipv6", "uuid", "uri", "regex", "color"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    _joined(st.just({"type": "integer"}), _bounds("minimum", "maximum", st.integers(-(10**6), 10**6))),
    _joined(st.just({"type": "number"}), _bounds("minimum", "maximum", FLOATS)),
    st.sampled_from([0.1, 0.25, 3, 7.5]).map(lambda step: {"type": "number", "multipleOf": step}),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(NAMES, inner, max_size=4)
    return st.one_of(
        st.builds(
            lambda declared, required, others: {
                "type": "object",
                "properties": declared,
                "required": [name for name in required if name in declared],
                "additionalProperties": others,
            },
            properties,
            st.lists(NAMES, unique=True),
            st.one_of(st.booleans(), inner),
        ),
        _joined(inner.map(lambda items: {"type": "array", "items": items}), _bounds("minItems", "maxItems", SMALL)),
        st.lists(inner, min_size=1, max_size=3).map(lambda first: {"type": "array", "prefixItems": first}),
        st.lists(inner, min_size=1, max_size=3).map(lambda either: {"anyOf": either}),
    )


SCHEMAS = st.recursive(LEAVES, _nested, max_leaves=12)


@given(schema=SCHEMAS, seed=SEEDS)
def test_whatever_can_be_met_is_met(schema: Any, seed: int) -> None:
    check(schema, seed)


@given(parts=st.lists(SCHEMAS, min_size=2, max_size=3), seed=SEEDS)
def test_what_is_valid_under_several_schemas_is_valid_under_each(parts: list[Any], seed: int) -> None:
    try:
        value = drawn({"allOf": parts}, seed)
    except UnmetError:
        return  # most pairs contradict one another; the next test has some that do not
    for part in parts:
        VALIDATOR(part).validate(value)  # a value of an enum need not have the format that is asked for beside it


@given(schema=SCHEMAS, seed=SEEDS)
def test_a_schema_and_its_own_parts_do_not_contradict_one_another(schema: Any, seed: int) -> None:
    both = {"$defs": {"one": schema}, "allOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/one"}]}
    try:
        value = drawn(both, seed)
    except UnmetError:
        assert "anyOf" in json.dumps(schema)  # two draws of alternatives may differ, and exclude one another
        return
    VALIDATOR(schema, format_checker=FORMATS).validate(value)


@given(schema=SCHEMAS, seed=SEEDS)
def test_a_seed_gives_one_value(schema: Any, seed: int) -> None:
    assert json.dumps(drawn(schema, seed)) == json.dumps(drawn(schema, seed))


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "right": {"$ref": "#/$defs/node"},
            },
            "required": ["value", "left"],
        }
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
}
VARIANTS = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "x": {"type": "string"}}, "required": ["kind", "x"]}
        for kind in ("circle", "square")
    ]
}


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        VARIANTS,
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "patternProperties": {"^x-[a-z]+$": {"type": "boolean"}}, "minProperties": 2},
        {"type": "object", "minProperties": 3, "propertyNames": {"pattern": "^[a-c]{2}$"}},
        {"allOf": [{"type": "object", "minProperties": 4}, {"minProperties": 1}], "maxProperties": 6},
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}, "required": ["a"]},
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1},
        {"type": "object", "required": ["undeclared"]},
        {"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "additionalProperties": False},
        {"allOf": [{"properties": {"a": {"type": "integer"}}}], "unevaluatedProperties": False, "required": ["a"]},
        {"properties": {"never": {"not": {}}, "a": {"type": "null"}}, "additionalProperties": {"not": {}}},
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        {"type": "array", "prefixItems": [{}, {}], "items": {"type": "integer"}, "minItems": 5, "maxItems": 5},
        {"type": "string", "pattern": r"^\+?\d{3}-\d{4}$"},
        {"type": "string", "pattern": "a+", "minLength": 2, "maxLength": 3},
        {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 6},
        {"type": "number", "exclusiveMinimum": 0.0, "exclusiveMaximum": 0.001},
        {"type": "number", "minimum": 0.1234567, "maximum": 0.1234567},
        {"type": "integer", "multipleOf": 0.3},
        {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "minimum": 1},
        {"allOf": [{"type": "number"}, {"type": "integer", "minimum": 3}], "maximum": 4},
        {"enum": [1, "a", None], "type": "string"},
        {"const": {"deep": [1, {"er": None}]}},
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "boolean"}}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_what_clients_send(schema: Any) -> None:
    for seed in range(200):
        check(schema, seed)


DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        (DECIMAL, lambda value: isinstance(value, int | float)),
        ({"anyOf": [{"if": True}, {"type": "null"}]}, lambda value: value is None),
        ({"oneOf": [{"$ref": "https://x"}, {"$ref": "#nowhere"}, {"const": 3}]}, lambda value: value == 3),
        ({"properties": {"a": {"not": {"type": "null"}}, "b": {"pattern": "(?=x)"}}}, lambda value: value == {}),
        ({"type": "array", "items": {"contains": 3}}, lambda value: value == []),
        ({"format": "email", "type": "string", "pattern": r"^(?!\.)\S+$"}, lambda value: "@example.com" in value),
        ({"anyOf": [{"type": "foo"}, {"minimum": "a", "type": "number"}, {"const": 1}]}, lambda value: value == 1),
        ({"anyOf": [{"pattern": "(a$|b)c"}]}, lambda value: value == "bc"),
    ],
)
def test_another_way_is_taken_where_one_is_not_supported(schema: Any, fits: Any) -> None:
    for seed in range(50):
        assert fits(drawn(schema, seed)), drawn(schema, seed)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[a-zA-Z0-9_]+$", "minLength": 8},
        {"type": "string", "pattern": r"^[\w-]*$", "minLength": 30, "maxLength": 32},
        {"type": "string", "pattern": "^.+$", "minLength": 200},
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": 1},
        {"type": "string", "pattern": "^([a-z]{2,3}-)*[a-z]$", "minLength": 9, "maxLength": 9},
        {"type": "string", "format": "uri", "minLength": 60},
        {"type": "string", "format": "email", "minLength": 40},
        {"type": "object", "patternProperties": {"^S_": {"type": "string"}}, "minProperties": 3},
        {
            "allOf": [{"unevaluatedProperties": {"type": "string"}}, {"unevaluatedProperties": {"minLength": 9}}],
            "minProperties": 1,
        },
        {"type": "array", "items": {"type": "integer"}, "minItems": 1500},
        {"const": {"$ref": "#/nowhere"}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_lengths_and_counts_are_reached(schema: Any) -> None:
    for seed in range(20):
        check(schema, seed)


def test_references_may_lack_their_hash() -> None:
    assert drawn({"$defs": {"x": {"const": 1}}, "$ref": "/$defs/x"}) == 1


def test_work_is_bounded_for_one_output_and_for_all_of_a_request() -> None:
    many = [{"properties": {f"{part}_{place}": {} for place in range(24)}} for part in range(100)]
    with pytest.raises(UnmetError, match="takes more than 50000 steps"):
        drawn({"allOf": many})
    chain = {f"a{place}": [f"a{place + 1}"] for place in range(1900)}
    with pytest.raises(UnmetError, match="takes more than 50000 steps"):
        drawn({"properties": {name: {"type": "null"} for name in chain}, "dependentRequired": chain})
    shared = SharedConstraint(
        router_pb2.Constraint(json_schema=json.dumps({"type": "array", "minItems": 1000, "items": {"type": "null"}}))
    )
    num_drawn = 0
    with contextlib.suppress(InvalidRequest):
        for seed in range(1000):
            shared.draw(seed)
            num_drawn += 1
    assert 20 < num_drawn < 100
    with pytest.raises(InvalidRequest, match="takes more than 1000000 steps in all outputs"):
        shared.draw(1)


@pytest.mark.parametrize(
    "text", ['{"minimum": 1e999, "type": "number"}', '{"const": [1e999]}', '{"const": NaN}', "[", '"']
)
def test_what_is_no_json_is_no_schema(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is no JSON"):
        SharedConstraint(router_pb2.Constraint(json_schema=text)).draw(0)


def test_an_output_may_have_another_form_by_chance() -> None:
    either = router_pb2.Constraint(text="one", probability=0.3)
    either.otherwise.CopyFrom(router_pb2.Constraint(text="two"))
    texts = [SharedConstraint(either).draw(seed) for seed in range(1000)]
    assert 230 < texts.count("one") < 370
    assert set(texts) == {"one", "two"}
    either.regex = "(?=a)"  # cannot be met
    assert {SharedConstraint(either).draw(seed) for seed in range(20)} == {"two"}
    assert SharedConstraint(router_pb2.Constraint(probability=0.0, text="x")).draw(1) is None
    with pytest.raises(InvalidRequest, match="it must be 0 to 1"):
        SharedConstraint(router_pb2.Constraint(probability=1.5, text="x")).draw(1)


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(InvalidRequest, match="half a character"):
        SharedConstraint(router_pb2.Constraint(regex=r"[\ud800-\udbff]")).draw(1)
    assert SharedConstraint(router_pb2.Constraint(json_schema='{"const": "\\ud800"}')).draw(1) == '"\\ud800"'


def test_names_of_older_drafts_are_read() -> None:
    for seed in range(50):
        value = drawn({"items": [{"type": "null"}, {"type": "null"}], "additionalItems": False}, seed)
        assert value in ([None], [None, None], [])
        assert drawn({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 4}, seed) == 4
        assert drawn({"type": "object", "dependencies": {"a": ["b"]}, "required": ["a"]}, seed).keys() == {"a", "b"}
    assert None in [drawn({"type": "string", "nullable": True}, seed) for seed in range(20)]


def test_an_optional_property_comes_and_goes_and_the_order_is_the_schemas() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "m": {}}, "required": ["m"]}
    orders = {tuple(drawn(schema, seed)) for seed in range(100)}
    assert orders == {("z", "a", "m"), ("z", "m"), ("a", "m"), ("m",)}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "leads over 64 levels deep"),
        ({"$ref": "#"}, "leads over 64 levels deep"),
        ({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, "leads over 64 levels deep"),
        ({"anyOf": [{"$ref": "#"}] * 10}, "asks for more than 2048 values"),
        ({"type": "array", "minItems": 2000, "items": {"enum": list(range(1000))}}, "takes more than 50000 steps"),
        ({"type": "array", "minItems": 99, "items": {"const": "x" * 999}}, "asks for more than 65536 characters"),
        ({"required": ["x" * 70_000]}, "asks for more than 65536 characters"),
        ({"type": "array", "minItems": 10**9}, "asks for more than 2048 values"),
        ({"type": "object", "minProperties": 10**9}, "asks for more than 2048 values"),
        ({"type": "string", "minLength": 10**9}, "asks for more than 65536 characters"),
        ({"type": "string", "pattern": "(){999999999}"}, "takes more than 50000 steps"),
        ({"type": "string", "pattern": "a" * 5000}, "has a pattern of 5000 characters"),
        ({"type": "foo"}, 'has type "foo"; types are string'),
        ({"type": [{}]}, "has type {}"),
        ({"type": 3}, "has a number for type"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "bounds that leave none"),
        ({"type": "number", "minimum": 5, "maximum": 4}, "bounds that leave none"),
        ({"type": "integer", "minimum": "a"}, 'has minimum "a"; it must be a number'),
        ({"allOf": [{"minimum": "a"}, {"minimum": 1}]}, "it must be a number"),
        ({"type": "number", "multipleOf": 0}, "it must be above 0"),
        ({"type": "object", "minProperties": 5, "maxProperties": 3}, "5 properties and allows 3"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "3 characters or more, and 2 at most"),
        ({"type": "string", "minLength": -1}, "it must be a whole number from 0 on"),
        (False, "allows none"),
        ({"not": {}}, "allows none"),
        (3, "has a number for a schema"),
        ({"not": {"type": "string"}}, "uses not, which is not supported"),
        ({"if": True, "then": False}, "uses if, which is not supported"),
        ({"enum": []}, "whose values the rest of the schema excludes"),
        ({"allOf": [{"enum": [1]}, {"enum": [2]}]}, "none in common"),
        ({"allOf": [{"type": "string"}, {"type": "array"}]}, "two types at once"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "two kinds of pattern"),
        ({"$ref": "https://example.com/schema"}, "only references of the form #/"),
        ({"$ref": "#anchor"}, "only references of the form #/"),
        ({"$ref": "#/nowhere"}, "which it does not have"),
        ({"required": [{}]}, "whose names are no array of strings"),
        ({"dependencies": {"a": [3]}, "type": "object", "required": ["a"]}, "no names of properties"),
        ({"dependentRequired": {"a": 3}}, "whose names are no array of strings"),
        ({"properties": 3}, "has a number for properties"),
        ({"properties": {"a": 3}, "required": ["a"]}, "has a number for a schema"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "allows none"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "an array of 2 elements and allows 1"),
        (
            {"type": "array", "uniqueItems": True, "minItems": 3, "items": {"type": "boolean"}},
            "more different elements",
        ),
        ({"anyOf": []}, "has an empty list of alternatives"),
    ],
    ids=lambda case: json.dumps(case)[:60],
)
def test_what_cannot_be_met_is_named(schema: Any, why: str) -> None:
    with pytest.raises(UnmetError, match=f".*{why.replace('{', '.').replace('}', '.')}"):
        drawn(schema)


def test_a_schema_of_many_properties_is_drawn_in_part() -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(20_000)}}
    assert len(drawn(schema)) == 200
