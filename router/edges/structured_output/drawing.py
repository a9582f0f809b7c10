"""From a request's constraint to the text of its output."""

import asyncio
import contextlib
import json
from functools import lru_cache
from math import isinf
from random import Random

from lorrery.router.edges.structured_output import pattern, schema
from lorrery.router.edges.structured_output.budget import MAX_ALL_STEPS, Budget, UnmetError
from lorrery.router.edges.structured_output.keywords import Json
from lorrery.service.errors import InvalidRequest
from lorrery.v1 import router_pb2
from lorrery.vocabulary.outputs import hash64

MAX_SCHEMA_BYTES = 1024 * 1024
_POSITION = -3
"""Position in a request's random stream from which its constraint draws; tokens use positions from 0 on."""
_ANY_OBJECT = {"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean"]}}


class SharedConstraint:
    """The constraint on all outputs of one request.

    Args:
        constraint: as the client sent it.

    Attributes:
        turn: is held by the output that draws, so that other requests' outputs come between those of one.
    """

    def __init__(self, constraint: router_pb2.Constraint) -> None:
        self._constraint = constraint
        self._steps_left = MAX_ALL_STEPS
        self.turn = asyncio.Lock()

    def draw(self, seed: int) -> str | None:
        """Return the text that the constraint and a seed give; None: this output has none.

        It computes for some tens of milliseconds at most, and may be called in a thread.

        Raises:
            InvalidRequest: no output meets the constraint, or it is not supported.
        """
        constraint: router_pb2.Constraint | None = self._constraint
        rng = Random(hash64(seed, _POSITION))
        while constraint is not None:
            probability = constraint.probability
            if not 0 <= probability <= 1:
                raise InvalidRequest(
                    f"constraint.probability is {probability:g}; it must be 0 to 1",
                    field="constraint.probability",
                    limit=1,
                )
            if not constraint.HasField("probability"):
                return self._drawn(constraint, rng)
            if rng.random() < probability:
                with contextlib.suppress(InvalidRequest):  # what an output need not have it may be unable to have
                    return self._drawn(constraint, rng)
            constraint = constraint.otherwise if constraint.HasField("otherwise") else None
        return None

    def _drawn(self, constraint: router_pb2.Constraint, rng: Random) -> str | None:
        form, budget = constraint.WhichOneof("form"), Budget(self._steps_left)
        try:
            return None if form is None else _text(constraint, form, rng, budget)
        except UnmetError as error:
            raise InvalidRequest(f"constraint.{form} {error}", field=f"constraint.{form}") from None
        except RecursionError:
            raise InvalidRequest(
                f"constraint.{form} is nested too deeply; give one with fewer levels", field=f"constraint.{form}"
            ) from None
        finally:
            self._steps_left -= budget.steps


def _text(constraint: router_pb2.Constraint, form: str, rng: Random, budget: Budget) -> str | None:
    if form == "json_schema":
        return _json(schema.draw(_parsed(constraint.json_schema), rng, budget))
    if form == "json_object":
        return _json(schema.draw(_ANY_OBJECT, rng, budget)) if constraint.json_object else None
    if form == "regex":
        return _encodable(pattern.draw(constraint.regex, rng, budget))
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
        return _encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except UnmetError:
        return json.dumps(value)  # which spells them as JSON can


@lru_cache(maxsize=4)
def _parsed(text: str) -> object:
    """Return a schema; the outputs of one request have the same."""
    if len(text) > MAX_SCHEMA_BYTES:
        raise UnmetError(f"has {len(text)} characters; it may have {MAX_SCHEMA_BYTES}; give a smaller schema")
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except ValueError as error:
        raise UnmetError(f"is no JSON: {error}; correct it") from None


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise ValueError(f"{text} is beyond the range of numbers")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
