"""Describes the numbers that a setting accepts, and rejects booleans, which Python treats as numbers."""

import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

KINDS: Mapping[object, str] = {int: "whole number", float: "number"}
_BOUNDS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))

_WHOLE = 1000
"""Bounds of at least this are shown with all their digits."""


def flat(metadata: Sequence[Any]) -> list[Any]:
    """Return an annotation's metadata, with that of nested fields."""
    return [one for entry in metadata for one in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def in_words(kind: object, metadata: Sequence[Any]) -> str:
    """Describe the numbers that an annotation accepts: `whole number at least 1`."""
    found = (
        f"{words} {_shown(getattr(one, attribute))}"
        for one in flat(metadata)
        for bound, attribute, words in _BOUNDS
        if isinstance(one, bound)
    )
    return f"{KINDS[kind]} {' and '.join(found)}".rstrip()


def _shown(bound: float) -> str:
    return f"{int(bound):,}" if bound >= _WHOLE and bound == int(bound) else f"{bound:g}"


def refuse_booleans(model: type[BaseModel], name: str, value: object) -> None:
    """Check that a numeric field gets no boolean, also not in a list or a table.

    Raises:
        ValueError: it does; the message says which number is expected.
    """
    expected = _expected(model, name)
    if expected is None:
        return
    found = next(_booleans(value), None)
    if found is not None:
        shown = str(bool(found)).lower()
        raise ValueError(f"expected a {expected}, got {shown}, a boolean; write the number itself")


@cache
def _expected(model: type[BaseModel], name: str) -> str | None:
    field = model.model_fields[name]
    return _number(field.annotation, field.metadata)


def _number(kind: Any, metadata: Sequence[Any]) -> str | None:  # noqa: ANN401  any annotation
    """Describe the number that an annotation accepts, directly or in a list or table; None: none, or booleans too."""
    if kind in KINDS:
        return in_words(kind, metadata)
    arguments = get_args(kind)
    if annotations := getattr(kind, "__metadata__", ()):
        return _number(arguments[0], annotations)
    if bool in arguments or Any in arguments or get_origin(kind) is Literal:
        return None
    is_union = get_origin(kind) in (Union, types.UnionType)
    found = (_number(one, metadata if is_union else ()) for one in arguments)
    return next((one for one in found if one is not None), None)


def _booleans(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _booleans(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _booleans(one)
    elif isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")):
        yield value
