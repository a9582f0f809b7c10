"""Draws JSON values that are valid under a JSON Schema.

The vocabulary is that of draft 2020-12, with the older names of `$defs`, `prefixItems` and `dependentRequired`. Of
`anyOf` and `oneOf` one alternative is drawn; as in the grammars of engines, another one of `oneOf` may be valid too.
Keywords that say what a value must not be (`not`, `if`, `contains`, `dependentSchemas`) are refused where they matter.

Values are small: strings of a few words, arrays of a few elements, and no more than the required properties further
down. Where a way leads to no value, as in a schema that contains itself, another is drawn; the last attempts take the
shortest way only.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil, floor
from random import Random
from urllib.parse import unquote

from lorrery.chassis.names import quoted
from lorrery.router.constraint import pattern
from lorrery.router.constraint.budget import MAX_LEVELS, Budget, DeadEndError, UnmetError
from lorrery.router.constraint.formats import FORMATS
from lorrery.router.constraint.keywords import (
    ALTERNATIVES,
    RESOLVED,
    bound,
    check,
    complexity,
    count,
    fits,
    further,
    modern,
    plain,
    window,
    with_dependents,
)
from lorrery.router.constraint.merging import Json, Schema, both, number, types_of
from lorrery.router.constraint.words import phrase, word

_ATTEMPTS = (False, False, True, True, True)
"""Whether each attempt takes the shortest way."""
_FULL_LEVELS = 3
"""Levels on which optional properties and elements are drawn."""
_FEW = 3
_LENGTH_ATTEMPTS = 32
_CENTS = 100

_KEYS_OF: Mapping[str, Sequence[str]] = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "propertyNames", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords from which the type of a value follows if a schema names none."""
_REFUSED = ("not", "if", "contains", "dependentSchemas", "$dynamicRef", "$recursiveRef")
_SIZED = ("properties", "required", "enum", "dependentRequired", "prefixItems", *RESOLVED)


def draw(schema: object, rng: Random, budget: Budget) -> Json:
    """Return a value that is valid under a schema.

    Raises:
        UnmetError: there is none, none was found, or the schema is none or is not supported.
    """
    failed: DeadEndError | None = None
    for briefly in _ATTEMPTS:
        try:
            return _Drawing(schema, rng, budget, briefly=briefly).value(schema, 0)
        except DeadEndError as error:
            failed = error
    assert failed is not None
    raise failed


class _Drawing:
    """One attempt to draw a value.

    Args:
        root: the whole schema, to which references refer.
        rng: the source of all choices.
        budget: is charged.
        briefly: whether to take the shortest way.
    """

    def __init__(self, root: object, rng: Random, budget: Budget, *, briefly: bool) -> None:
        self._root = root
        self._rng = rng
        self._budget = budget
        self._full_levels = 0 if briefly else _FULL_LEVELS

    # --- schemas ----------------------------------------------------------------------------------------------------

    def _flat(self, schema: object, level: int) -> Schema:
        """Return an equivalent schema without references and alternatives, one of which is drawn."""
        self._budget.take_value()
        if schema is True:
            return {}
        if schema is False:
            raise DeadEndError("asks for a value where it allows none; change it")
        if not isinstance(schema, dict):
            raise UnmetError(f"has a schema of type {type(schema).__name__}; a schema is an object, true or false")
        if level > MAX_LEVELS:
            raise DeadEndError(f"leads over {MAX_LEVELS} levels deep; give it a way to end earlier")
        if schema.get("not") in ({}, True):
            raise DeadEndError("asks for a value where it allows none; change it")
        self._budget.take_steps(sum(len(schema[key]) for key in _SIZED if isinstance(schema.get(key), dict | list)))
        check(schema)
        flat = modern(schema)
        if "$ref" in schema:
            flat = both(flat, self._flat(self._resolved(schema["$ref"]), level + 1))
        for part in schema.get("allOf", ()):
            flat = both(flat, self._flat(part, level + 1))
        for key in ALTERNATIVES:
            if key in schema:
                flat = self._with_one_of(flat, schema[key], level)
        return flat

    def _with_one_of(self, flat: Schema, alternatives: Sequence[object], level: int) -> Schema:
        failed = DeadEndError("has an empty list of alternatives; give one")
        for alternative in self._ordered(alternatives, level):
            try:
                return both(flat, self._flat(alternative, level + 1))
            except DeadEndError as error:
                failed = error
        raise failed

    def _ordered(self, alternatives: Sequence[object], level: int) -> list[object]:
        """Return alternatives in random order, where it must end soon the simple ones first."""
        order = self._rng.sample(alternatives, len(alternatives))
        if level >= self._full_levels:
            order.sort(key=complexity)
        return order

    def _resolved(self, reference: str) -> object:
        if not reference.startswith("#"):
            raise UnmetError(f"refers to {quoted(reference)}; only references into the schema itself, #/..., are read")
        found = self._root
        for part in unquote(reference[1:]).split("/")[1:] if reference != "#" else ():
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise UnmetError(f"refers to {quoted(reference)}, which it does not have; define it")
        if reference != "#" and not reference.startswith("#/"):
            raise UnmetError(f"refers to {quoted(reference)}; only references of the form #/... are read")
        return found

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, schema: object, level: int) -> Json:
        """Return a value for a schema `level` levels deep."""
        flat = self._flat(schema, level)
        for key in _REFUSED:
            if key in flat:
                raise UnmetError(f"uses {key}, which is not supported; write it without")
        if "enum" in flat:
            return self._one_of(flat["enum"], flat)
        kind = self._type(flat, level)
        if kind == "null":
            return None
        if kind == "boolean":
            return self._rng.random() < 0.5
        if kind == "string":
            return self._string(flat)
        if kind in ("integer", "number"):
            return self._number(flat, whole=kind == "integer")
        return self._array(flat, level) if kind == "array" else self._object(flat, level)

    def _one_of(self, values: Sequence[Json], flat: Schema) -> Json:
        """Return one of an enum's values that the other keywords allow."""
        self._budget.take_steps(len(values))
        fitting = [value for value in values if fits(value, flat)]
        if not fitting:
            raise DeadEndError("has an enum whose values the rest of the schema excludes; change one of the two")
        value = self._rng.choice(fitting)
        self._budget.take_characters(len(json.dumps(value)))
        return value

    def _type(self, flat: Schema, level: int) -> str:
        named = types_of(flat)
        if named is None:
            named = [kind for kind, keys in _KEYS_OF.items() if any(key in flat for key in keys)][:1]
        choices = named or ["string", "integer", "boolean"]
        if level >= self._full_levels:
            choices = [kind for kind in choices if kind not in ("array", "object")] or choices
        return self._rng.choice(choices)

    def _string(self, flat: Schema) -> str:
        least, most = count(flat, "minLength", 0), count(flat, "maxLength", None)
        make = FORMATS.get(flat.get("format", ""))
        if make is None and "pattern" not in flat:
            return phrase(self._rng, self._budget, least or 0, most)
        for _ in range(_LENGTH_ATTEMPTS):
            if "pattern" in flat:
                text = pattern.draw(flat["pattern"], self._rng, self._budget)
            else:
                assert make is not None
                text = make(self._rng)
            if (least or 0) <= len(text) and (most is None or len(text) <= most):
                return text
        raise DeadEndError("has a pattern or format for which no string of its length was found; allow other lengths")

    def _number(self, flat: Schema, *, whole: bool) -> int | float:
        low, low_excluded = bound(flat, "minimum", "exclusiveMinimum", max)
        high, high_excluded = bound(flat, "maximum", "exclusiveMaximum", min)
        step = Fraction(1) if whole else None
        if "multipleOf" in flat:
            step = number(flat["multipleOf"], "multipleOf")
            if step <= 0:
                raise UnmetError(f"has multipleOf {flat['multipleOf']}; it must be above 0")
            if whole:
                step = Fraction(step.numerator)
        first, last = window(low, high, step or Fraction(1))
        for grid in (step,) if step is not None else (Fraction(1, _CENTS), (last - first) / _CENTS):
            if not grid:
                continue
            least, most = ceil(first / grid), floor(last / grid)
            least += bool(low_excluded and least * grid == low)
            most -= bool(high_excluded and most * grid == high)
            if least <= most:
                return plain(self._rng.randint(least, most) * grid)
        if first == last and step is None and not (low_excluded or high_excluded):
            return plain(first)
        raise DeadEndError("asks for a number between bounds that leave none; change one of them")

    def _array(self, flat: Schema, level: int) -> list[Json]:
        first, rest = flat.get("prefixItems", []), flat.get("items", flat.get("unevaluatedItems", True))
        least, most = count(flat, "minItems", 0) or 0, count(flat, "maxItems", None)
        few = self._rng.randint(1, _FEW) if level < self._full_levels else len(first)
        wanted = max(least, few, len(first))
        if rest is False:
            wanted = min(wanted, len(first))
        if most is not None:
            wanted = min(wanted, most)
        if wanted < least:
            raise DeadEndError(f"asks for an array of {least} elements and allows {wanted}; change one of the two")
        self._budget.take_value(least)
        found: list[Json] = []
        seen: set[str] = set()
        for place in range(wanted):
            schema = first[place] if place < len(first) else rest
            try:
                found.append(
                    self._another(schema, level, seen) if flat.get("uniqueItems") else self.value(schema, level + 1)
                )
            except DeadEndError:
                if len(found) < least:
                    raise
                break
        return found

    def _another(self, schema: object, level: int, seen: set[str]) -> Json:
        """Return a value that is not among those seen, and add it."""
        for _ in range(_LENGTH_ATTEMPTS):
            value = self.value(schema, level + 1)
            key = json.dumps(value, sort_keys=True)
            if key not in seen:
                seen.add(key)
                return value
        raise DeadEndError("asks for more different elements than were found; ask for fewer")

    def _object(self, flat: Schema, level: int) -> dict[str, Json]:
        properties, required = flat.get("properties", {}), flat.get("required", ())
        dependents = flat.get("dependentRequired", {})
        self._budget.take_steps(len(properties))
        most = count(flat, "maxProperties", None)
        wanted = dict.fromkeys(with_dependents(required, dependents))
        if most is not None and len(wanted) > most:
            raise DeadEndError(f"requires {len(wanted)} properties and allows {most}; change one of the two")
        if level < self._full_levels:
            limit = self._budget.values_left // 2 if most is None else most
            for name in properties:
                if name not in wanted and self._rng.random() < 0.5:
                    more = [other for other in with_dependents([name], dependents) if other not in wanted]
                    if len(wanted) + len(more) <= limit:
                        wanted.update(dict.fromkeys(more))
        for name in properties:
            if len(wanted) >= (count(flat, "minProperties", 0) or 0):
                break
            wanted.update(dict.fromkeys(with_dependents([name], dependents)))
        found: dict[str, Json] = {}
        for name in sorted(wanted, key=_Order(properties)):
            self._budget.take_characters(len(name))
            try:
                found[name] = self.value(properties.get(name, further(flat)), level + 1)
            except DeadEndError:
                if name in required or name in with_dependents(found, dependents):
                    raise
        self._fill(found, flat, most, level)
        return found

    def _fill(self, found: dict[str, Json], flat: Schema, most: int | None, level: int) -> None:
        """Add properties of other names: as many as there must be, and a few to an object that is a map."""
        least, properties = count(flat, "minProperties", 0) or 0, flat.get("properties", {})
        others = further(flat)
        patterns = flat.get("patternProperties", {})
        is_map = not properties and (bool(patterns) or isinstance(others, dict)) and level < self._full_levels
        wanted = max(least, self._rng.randint(1, _FEW) if is_map else 0)
        self._budget.take_value(least)
        for _ in range(_LENGTH_ATTEMPTS + 2 * wanted):
            if len(found) >= (wanted if most is None else min(wanted, most)):
                return
            if patterns:
                expression = self._rng.choice(list(patterns))
                name, schema = pattern.draw(expression, self._rng, self._budget), patterns[expression]
            else:
                name, schema = self._name(flat), others
            if name not in found and name not in properties:
                try:
                    found[name] = self.value(schema, level + 1)
                except DeadEndError:
                    if len(found) < least:
                        raise
                    return
        if len(found) < least:
            raise DeadEndError(f"asks for {least} properties, and fewer names were found; ask for fewer")

    def _name(self, flat: Schema) -> str:
        if "propertyNames" not in flat:
            return word(self._rng)
        name = self.value(both({"type": "string"}, self._flat(flat["propertyNames"], 0)), 0)
        assert isinstance(name, str)
        return name


class _Order:
    """Sorts names of properties as a schema declares them, then the others; `sorted` keeps their order."""

    def __init__(self, properties: Iterable[str]) -> None:
        self._places = {name: place for place, name in enumerate(properties)}

    def __call__(self, name: str) -> int:
        return self._places.get(name, len(self._places))
