"""What holds under two JSON Schemas at once, without their references and alternatives, which `schema` resolves."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from json import dumps
from math import gcd, lcm
from typing import Any

from lorrery.router.edges.structured_output.budget import DeadEndError

Json = Any
"""Any value of JSON."""
Schema = dict[str, Json]


def both(one: Schema, other: Schema) -> Schema:
    """Return a schema under which exactly the values are valid that are so under both.

    Raises:
        DeadEndError: there are none, or what they ask for together is not supported.
    """
    if not one or not other:
        return one or other
    merged = one | other
    for key in one.keys() & other.keys():
        if one[key] == other[key] and key != "additionalProperties":
            continue
        merge = _MERGES.get(key)
        if merge is not None:
            merged[key] = merge(one[key], other[key])
        elif key in _EITHER:
            raise DeadEndError(f"asks for two kinds of {key} at once; ask for one")
    _merge_properties(one, other, merged)
    _merge_items(one, other, merged)
    return merged


def types_of(schema: Schema) -> list[str] | None:
    """Return the types that a schema names; None: any."""
    named = schema.get("type")
    return None if named is None else [named] if isinstance(named, str) else list(named)


def number(value: Json, key: str) -> Fraction:
    """Return a number of a schema, exactly as it is written.

    Raises:
        DeadEndError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DeadEndError(f"has {key} {dumps(value)[:50]}; it must be a number")
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _types(one: Json, other: Json) -> list[str]:
    ours, theirs = types_of({"type": one}), types_of({"type": other})
    assert ours is not None
    assert theirs is not None
    if "number" in theirs:
        theirs.append("integer")
    common = [name for name in ours if name in theirs]
    if "number" in ours and "integer" in theirs and not {"integer", "number"} & set(common):
        common.append("integer")
    if not common:
        raise DeadEndError("asks for two types at once; ask for one")
    return common


def _enums(one: Json, other: Json) -> list[Json]:
    known = {dumps(value, sort_keys=True) for value in other}  # apart from the types of numbers, 1 and 1.0 among them
    common = [value for value in one if dumps(value, sort_keys=True) in known]
    if not common:
        raise DeadEndError("asks for a value out of two enums that have none in common; change one of them")
    return common


def _multiples(one: Json, other: Json) -> Json:
    first, second = number(one, "multipleOf"), number(other, "multipleOf")
    both_of = Fraction(lcm(first.numerator, second.numerator), gcd(first.denominator, second.denominator))
    return both_of.numerator if both_of.denominator == 1 else float(both_of)


def _largest(one: Json, other: Json) -> Json:
    return max(one, other, key=lambda value: number(value, "a bound"))


def _smallest(one: Json, other: Json) -> Json:
    return min(one, other, key=lambda value: number(value, "a bound"))


def _all_of(one: Json, other: Json) -> Schema:
    parts = one["allOf"] if isinstance(one, dict) and one.keys() == {"allOf"} else [one]
    return {"allOf": [*parts, other]}


_MERGES: Mapping[str, Callable[[Json, Json], Json]] = {
    "type": _types,
    "enum": _enums,
    "multipleOf": _multiples,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), _largest),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), _smallest),
    "uniqueItems": lambda one, other: one or other,
    **dict.fromkeys(
        ("unevaluatedProperties", "unevaluatedItems"),
        lambda one, other: False if False in (one, other) else _all_of(one, other),
    ),
    "required": lambda one, other: [*dict.fromkeys([*one, *other])],
    "propertyNames": _all_of,
    "dependentRequired": lambda one, other: {
        name: [*one.get(name, ()), *other.get(name, ())] for name in {**one, **other}
    },
}
_EITHER = ("pattern", "format", "patternProperties")


def _merge_properties(one: Schema, other: Schema, merged: Schema) -> None:
    ours, theirs = one.get("properties", {}), other.get("properties", {})
    our_others, their_others = one.get("additionalProperties", True), other.get("additionalProperties", True)
    properties = {}
    for name in {**ours, **theirs}:
        schemas = [ours.get(name, our_others), theirs.get(name, their_others)]
        schemas = [schema for schema in schemas if schema is not True]
        properties[name] = schemas[0] if len(schemas) == 1 else _all_of(*schemas) if schemas else True
    if properties:
        merged["properties"] = properties
    others = [schema for schema in (our_others, their_others) if schema is not True]
    if others:
        merged["additionalProperties"] = (
            False if False in others else others[0] if len(others) == 1 else _all_of(*others)
        )


def _merge_items(one: Schema, other: Schema, merged: Schema) -> None:
    ours, theirs = one.get("prefixItems", []), other.get("prefixItems", [])
    our_rest, their_rest = one.get("items", True), other.get("items", True)
    if ours or theirs:
        merged["prefixItems"] = [
            _all_of(
                ours[place] if place < len(ours) else our_rest, theirs[place] if place < len(theirs) else their_rest
            )
            for place in range(max(len(ours), len(theirs)))
        ]
    if "items" in one or "items" in other:
        merged["items"] = _all_of(our_rest, their_rest)
