"""Draws JSON values that are valid under a JSON Schema.

The vocabulary is that of draft 2020-12, with the older names of `$defs`, `prefixItems` and `dependentRequired`. Of
`anyOf` and `oneOf` one alternative is drawn; as in the grammars of engines, another one of `oneOf` may be valid too.
Keywords that say what a value must not be (`not`, `if`, `contains`, `dependentSchemas`) are ways that end: another
alternative is drawn, an optional property is left out. `patternProperties` holds for further names only, and a value of
an `enum` is taken whatever its `pattern`.

Values are small: strings of a few words, arrays of a few elements, and no more than the required properties further
down. Where a way leads to no value, as in a schema that contains itself, another is drawn; the last attempts take the
shortest way only.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import ceil, floor
from random import Random
from urllib.parse import unquote

from lorrery.router.edges.structured_output import pattern
from lorrery.router.edges.structured_output.budget import MAX_LEVELS, Budget, DeadEndError
from lorrery.router.edges.structured_output.keywords import (
    ALTERNATIVES,
    Json,
    Schema,
    both,
    bound,
    check,
    complexity,
    count,
    fits,
    further,
    json_type,
    modern,
    number,
    plain,
    size,
    types_of,
    window,
    with_dependents,
)
from lorrery.router.edges.structured_output.pattern import FORMATS, phrase, word
from lorrery.service.names import quoted

_ATTEMPTS = (False, True, True)
"""Whether each attempt takes the shortest way."""
_FULL_LEVELS = 3
"""Levels on which optional properties and elements are drawn."""
_FEW = 3
_TRIES = 32
"""To draw what differs from what there is, or has a given length."""
_CENTS = 100
_MOST_OPTIONAL = 200

_KEYS_OF: Mapping[str, Sequence[str]] = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "propertyNames", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords from which the type of a value follows if a schema names none."""
_REFUSED = ("not", "if", "contains", "dependentSchemas", "$dynamicRef", "$recursiveRef")


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

    def _flats(self, schema: object, level: int) -> Iterator[Schema]:
        """Yield, one for each way through its alternatives, schemas without references and alternatives.

        Raises:
            DeadEndError: a way ends, or there is none.
        """
        self._budget.take_value()
        if schema is True:
            yield {}
            return
        if schema is False:
            raise DeadEndError("asks for a value where it allows none; change it")
        if not isinstance(schema, dict):
            raise DeadEndError(f"has {json_type(schema)} for a schema; it must be an object, true or false")
        if level > MAX_LEVELS:
            raise DeadEndError(f"leads over {MAX_LEVELS} levels deep; give it a way to end earlier")
        if schema.get("not") in ({}, True):
            raise DeadEndError("asks for a value where it allows none; change it")
        self._budget.take_steps(size(schema))
        check(schema)
        flat = modern(schema)
        for key in _REFUSED:
            if key in flat:
                raise DeadEndError(f"uses {key}, which is not supported; write it without")
        parts = [[self._resolved(schema["$ref"])]] if "$ref" in schema else []
        parts += [[part] for part in schema.get("allOf", ())]
        parts += [self._ordered(schema[key], level) for key in ALTERNATIVES if key in schema]
        yield from self._combined(flat, parts, level)

    def _combined(self, flat: Schema, parts: Sequence[Sequence[object]], level: int) -> Iterator[Schema]:
        """Yield what a schema is together with one alternative of each part."""
        if not parts:
            yield flat
            return
        failed = DeadEndError("has an empty list of alternatives; give one")
        found = False
        for alternative in parts[0]:
            try:
                for other in self._flats(alternative, level + 1):
                    self._budget.take_steps(size(flat) + size(other))
                    for combined in self._combined(both(flat, other), parts[1:], level):
                        found = True
                        yield combined
            except DeadEndError as error:
                failed = error
        if not found:
            raise failed

    def _ordered(self, alternatives: Sequence[object], level: int) -> list[object]:
        """Return alternatives in random order, where it must end soon the simple ones first."""
        order = self._rng.sample(alternatives, len(alternatives))
        if level >= self._full_levels:
            order.sort(key=complexity)
        return order

    def _resolved(self, reference: str) -> object:
        self._budget.take_steps(len(reference) // 8)
        # Clients of Anthropic's write references without #.
        path = unquote(reference.removeprefix("#"))
        if not reference.startswith(("#", "/")) or (path and not path.startswith("/")):
            raise DeadEndError(f"refers to {quoted(reference)}; only references of the form #/... are read")
        found = self._root
        for part in path.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise DeadEndError(f"refers to {quoted(reference)}, which it does not have; define it")
        return found

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, schema: object, level: int) -> Json:
        """Return a value for a schema `level` levels deep.

        Raises:
            DeadEndError: none was found.
        """
        failed: DeadEndError | None = None
        for flat in self._flats(schema, level):
            try:
                return self._value_of(flat, level)
            except DeadEndError as error:
                failed = error
        assert failed is not None
        raise failed

    def _value_of(self, flat: Schema, level: int) -> Json:
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
        self._budget.take_steps(len(values) * (8 if "multipleOf" in flat else 1))
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
        least, most = count(flat, "minLength", 0) or 0, count(flat, "maxLength", None)
        make = FORMATS.get(flat.get("format", ""))
        if "pattern" in flat:
            try:
                return pattern.draw(flat["pattern"], self._rng, self._budget, least, most)
            except DeadEndError:
                if make is None:  # a format says as much as the pattern that zod puts beside it
                    raise
        for _ in range(_TRIES if make is not None else 0):
            assert make is not None
            text = make(self._rng, least)
            if least <= len(text) and (most is None or len(text) <= most):
                self._budget.take_characters(len(text))
                return text
        return phrase(self._rng, self._budget, least, most)

    def _number(self, flat: Schema, *, whole: bool) -> int | float:
        low, low_excluded = bound(flat, "minimum", "exclusiveMinimum", max)
        high, high_excluded = bound(flat, "maximum", "exclusiveMaximum", min)
        step = Fraction(1) if whole else None
        if "multipleOf" in flat:
            step = number(flat["multipleOf"], "multipleOf")
            if step <= 0:
                raise DeadEndError(f"has multipleOf {flat['multipleOf']}; it must be above 0")
            if whole:
                step = Fraction(step.numerator)
        first, last = window(low, high, step or Fraction(1))
        grids = [Fraction(1, _CENTS), (last - first) / _CENTS] if step is None else [step]
        if step is None and self._rng.random() < 0.5:  # many a number is meant to be whole
            grids.insert(0, Fraction(1))
        for grid in grids if first <= last else ():
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
        self._budget.check_values(least)
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
        for _ in range(_TRIES):
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
        wanted = dict.fromkeys(self._with_dependents(required, dependents))
        if most is not None and len(wanted) > most:
            raise DeadEndError(f"requires {len(wanted)} properties and allows {most}; change one of the two")
        least = count(flat, "minProperties", 0) or 0
        if most is not None and least > most:
            raise DeadEndError(f"asks for {least} properties and allows {most}; change one of the two")
        if level < self._full_levels:
            limit = _MOST_OPTIONAL if most is None else most
            for name in properties:
                if name not in wanted and self._rng.random() < 0.5:
                    more = [other for other in self._with_dependents([name], dependents) if other not in wanted]
                    if len(wanted) + len(more) <= limit:
                        wanted.update(dict.fromkeys(more))
        for name in properties:
            if len(wanted) >= least:
                break
            wanted.update(dict.fromkeys(self._with_dependents([name], dependents)))
        found: dict[str, Json] = {}
        for name in sorted(wanted, key=_Order(properties)):
            self._budget.take_characters(len(name))
            try:
                found[name] = self.value(properties.get(name, further(flat)), level + 1)
            except DeadEndError:
                if name in required or name in self._with_dependents(found, dependents):
                    raise
        self._fill(found, flat, most, level)
        return found

    def _with_dependents(self, names: Iterable[str], dependents: Mapping[str, Sequence[str]]) -> Iterable[str]:
        if not dependents:
            return names
        found = with_dependents(names, dependents)
        self._budget.take_steps(len(found))
        return found

    def _fill(self, found: dict[str, Json], flat: Schema, most: int | None, level: int) -> None:
        """Add properties of other names: as many as there must be, and a few to an object that is a map."""
        least, properties = count(flat, "minProperties", 0) or 0, flat.get("properties", {})
        others = further(flat)
        patterns = flat.get("patternProperties", {})
        is_map = not properties and (bool(patterns) or isinstance(others, dict)) and level < self._full_levels
        wanted = max(least, self._rng.randint(1, _FEW) if is_map else 0)
        self._budget.check_values(least)
        for _ in range(_TRIES + 2 * wanted):
            if len(found) >= (wanted if most is None else min(wanted, most)):
                return
            if patterns:
                expression = self._rng.choice(list(patterns))
                name, schema = pattern.draw(expression, self._rng, self._budget), patterns[expression]
                if not expression.endswith("$"):
                    name += word(self._rng)
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
        name = self.value({"allOf": [{"type": "string"}, flat["propertyNames"]]}, 0)
        assert isinstance(name, str)
        return name


class _Order:
    """Sorts names of properties as a schema declares them, then the others; `sorted` keeps their order."""

    def __init__(self, properties: Iterable[str]) -> None:
        self._places = {name: place for place, name in enumerate(properties)}

    def __call__(self, name: str) -> int:
        return self._places.get(name, len(self._places))
