"""What single keywords of a JSON Schema say, whether they are well formed, and what holds under two schemas at once.

References and alternatives are `schema`'s to resolve.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


ALTERNATIVES = ("anyOf", "oneOf")
RESOLVED = ("$ref", "allOf", *ALTERNATIVES)
"""Keywords that lead to other schemas for the same value."""

_SIZED = ("properties", "required", "enum", "dependentRequired", "dependencies", "prefixItems", *RESOLVED)
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_WINDOW = 100
_WIDEST = 1_000_000

_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("properties", "patternProperties", "dependentRequired", "$defs"), (dict,)),
    **dict.fromkeys(("required", "enum", "prefixItems", "allOf", *ALTERNATIVES), (list,)),
    **dict.fromkeys(("additionalProperties", "propertyNames"), (dict, bool)),
    "items": (dict, bool, list),
    "uniqueItems": (bool,),
    "dependencies": (dict,),
    **dict.fromkeys(("pattern", "format", "$ref"), (str,)),
    "type": (str, list),
}
"""Types of keywords; those that count things are checked where they are read."""


_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def json_type(value: object) -> str:
    """Return what a value is in JSON, with its article."""
    return "null" if value is None else _NAMES.get(type(value), "something else")


def size(schema: Schema) -> int:
    """Return how many names, values and alternatives a schema has at its top."""
    return sum(len(schema[key]) for key in _SIZED if isinstance(schema.get(key), dict | list))


def check(schema: Schema) -> None:
    """Check the types of a schema's keywords.

    Raises:
        DeadEndError: one has another.
    """
    for key in schema.keys() & _KINDS.keys():
        kinds = _KINDS[key]
        if not isinstance(schema[key], kinds):
            allowed = " or ".join(_NAMES[kind] for kind in kinds)
            raise DeadEndError(f"has {json_type(schema[key])} for {key}; it must be {allowed}")
    for name in types_of(schema) or ():
        if name not in _TYPES:
            raise DeadEndError(f"has type {dumps(name)}; types are {', '.join(_TYPES)}")
    for names in (schema.get("required", ()), *schema.get("dependentRequired", {}).values()):
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise DeadEndError("requires properties whose names are no array of strings; name them so")


def modern(schema: Schema) -> Schema:
    """Return the keywords that apply to a value, under today's names."""
    flat = {key: value for key, value in schema.items() if key not in RESOLVED}
    if "const" in flat:
        constant = [flat.pop("const")]
        flat = both({"enum": constant}, {"enum": flat.pop("enum")} if "enum" in flat else {}) | flat
    if isinstance(flat.get("items"), list):
        flat["prefixItems"] = flat["items"]
        flat["items"] = flat.pop("additionalItems", True)
    for key in ("minimum", "maximum"):  # draft 4
        excluded = f"exclusive{key.capitalize()}"
        if isinstance(flat.get(excluded), bool) and flat.pop(excluded) and key in flat:
            flat[excluded] = flat.pop(key)
    for name, needs in flat.pop("dependencies", {}).items():
        if not isinstance(needs, list):
            flat["dependentSchemas"] = needs
        elif not all(isinstance(other, str) for other in needs):
            raise DeadEndError("has dependencies that are no names of properties; name them so")
        else:
            flat["dependentRequired"] = flat.get("dependentRequired", {}) | {name: needs}
    if flat.get("nullable") is True and types_of(flat):  # OpenAPI 3.0
        flat["type"] = [*(types_of(flat) or ()), "null"]
    return flat


def complexity(schema: object) -> int:
    """Return how much a schema's value may consist of: nothing further, elements, properties, or who knows."""
    if not isinstance(schema, dict):
        return 0
    if any(key in schema for key in RESOLVED):
        return 3
    kinds = types_of(schema) or ()
    return 2 if "object" in kinds else 1 if "array" in kinds else 0


def further(flat: Schema) -> object:
    """Return the schema of properties that are not declared."""
    return flat.get("additionalProperties", flat.get("unevaluatedProperties", True))


def with_dependents(names: Iterable[str], dependents: Mapping[str, Sequence[str]]) -> list[str]:
    """Return names of properties, and of those that must be there if they are."""
    found = dict.fromkeys(names)
    if dependents:
        left = list(found)
        while left:
            more = [other for other in dependents.get(left.pop(), ()) if other not in found]
            found.update(dict.fromkeys(more))
            left += more
    return list(found)


def count(flat: Schema, key: str, default: int | None) -> int | None:
    """Return a keyword that counts something.

    Raises:
        DeadEndError: it is no count.
    """
    if key not in flat:
        return default
    value = number(flat[key], key)
    if value < 0 or value.denominator != 1:
        raise DeadEndError(f"has {key} {flat[key]}; it must be a whole number from 0 on")
    return value.numerator


def bound(
    flat: Schema, key: str, exclusive: str, tighter: Callable[[Iterable[Fraction]], Fraction]
) -> tuple[Fraction | None, bool]:
    """Return the tighter one of two bounds, and whether the bound itself is excluded."""
    bounds = [(number(flat[name], name), name == exclusive) for name in (key, exclusive) if name in flat]
    if not bounds:
        return None, False
    value = tighter(bound for bound, _ in bounds)
    return value, any(excluded for bound, excluded in bounds if bound == value)


def window(low: Fraction | None, high: Fraction | None, step: Fraction) -> tuple[Fraction, Fraction]:
    """Return the range from which a number is drawn: usual numbers, if the bounds allow them."""
    width = _WINDOW * step
    if low is None:
        if high is None:
            return Fraction(0), width
        return (Fraction(0), min(high, width)) if high > 0 else (high - width, high)
    if high is None:
        return (Fraction(0), width) if low <= 0 else (low, low + width)
    if high - low <= _WIDEST * step:
        return low, high
    return (Fraction(0), width) if low <= 0 and width <= high else (low, low + width)


def plain(value: Fraction) -> int | float:
    """Return a number as JSON has it."""
    return value.numerator if value.denominator == 1 else float(value)


def fits(value: object, flat: Schema) -> bool:
    """Return whether a value of an enum meets the keywords beside it: those of numbers, and of the length of texts."""
    kinds = types_of(flat)
    if kinds is not None and not any(_is(value, kind) for kind in kinds):
        return False
    if isinstance(value, str):
        least, most = count(flat, "minLength", 0), count(flat, "maxLength", None)
        return (least or 0) <= len(value) and (most is None or len(value) <= most)
    if _is(value, "number"):
        exact = number(value, "enum")
        low, low_excluded = bound(flat, "minimum", "exclusiveMinimum", max)
        high, high_excluded = bound(flat, "maximum", "exclusiveMaximum", min)
        below = low is not None and (exact < low or (low_excluded and exact == low))
        above = high is not None and (exact > high or (high_excluded and exact == high))
        step = number(flat["multipleOf"], "multipleOf") if flat.get("multipleOf") else None
        return not below and not above and (step is None or (exact / step).denominator == 1)
    return True


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")
