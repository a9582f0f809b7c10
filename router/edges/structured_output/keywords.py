"""What single keywords of a JSON Schema say, and whether they are well formed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from json import dumps

from lorrery.router.edges.structured_output.budget import DeadEndError
from lorrery.router.edges.structured_output.merging import Schema, both, number, types_of

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
