"""From a request's constraint to the text of its output."""

import json
from functools import lru_cache
from random import Random

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.constraint import pattern, schema
from lorrery.router.constraint.budget import Budget, UnmetError
from lorrery.router.constraint.merging import Json
from lorrery.v1 import router_pb2
from lorrery.vocabulary.splitmix import hash64

MAX_SCHEMA_BYTES = 1024 * 1024
_POSITION = -3
"""Position in a request's random stream from which its constraint draws; tokens use positions from 0 on."""
_ANY_OBJECT = {"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean"]}}


def drawn_output(constraint: router_pb2.Constraint, seed: int) -> str | None:
    """Return the text that a constraint and a seed give; None: this output has no constraint.

    Raises:
        InvalidRequest: no output meets the constraint, or it is not supported.
    """
    form = constraint.WhichOneof("form")
    if form is None:
        return None
    if not 0 <= constraint.probability <= 1:
        raise InvalidRequest(
            f"constraint.probability is {constraint.probability:g}; it must be 0 to 1",
            field="constraint.probability",
            limit=1,
        )
    rng = Random(hash64(seed, _POSITION))
    if constraint.HasField("probability") and rng.random() >= constraint.probability:
        return None
    try:
        return _text(constraint, form, rng)
    except UnmetError as error:
        raise InvalidRequest(f"constraint.{form} {error}", field=f"constraint.{form}") from None
    except RecursionError:
        raise InvalidRequest(
            f"constraint.{form} is nested too deeply; give one with fewer levels", field=f"constraint.{form}"
        ) from None


def _text(constraint: router_pb2.Constraint, form: str, rng: Random) -> str | None:
    if form == "json_schema":
        return _json(schema.draw(_parsed(constraint.json_schema), rng, Budget()))
    if form == "json_object":
        return _json(schema.draw(_ANY_OBJECT, rng, Budget())) if constraint.json_object else None
    if form == "regex":
        return _encodable(pattern.draw(constraint.regex, rng, Budget()))
    if form == "text":
        return constraint.text
    if not constraint.choices.texts:
        raise UnmetError("has no texts to choose from; give one")
    return rng.choice(constraint.choices.texts)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnmetError("asks for half a character, a surrogate; ask for the whole one") from None
    return text


def _json(value: Json) -> str:
    try:
        return _encodable(json.dumps(value, ensure_ascii=False))
    except UnmetError:
        return json.dumps(value)  # which spells them as JSON can


@lru_cache(maxsize=4)
def _parsed(text: str) -> object:
    """Return a schema; the outputs of one request have the same."""
    if len(text) > MAX_SCHEMA_BYTES:
        raise UnmetError(f"has {len(text)} characters; it may have {MAX_SCHEMA_BYTES}; give a smaller schema")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise UnmetError(f"is no JSON: {error}; correct it") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
