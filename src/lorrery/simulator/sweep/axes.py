"""The axes of a sweep: keys, the values of each, and their cross product.

    rate=1,2,4              values between commas
    workers=1..8            whole numbers from 1 to 8;  2..16..2 takes every second (as bash's {2..16..2})
    adapters=["all","a,b"]  a TOML (or JSON) array, for values that have commas

A value is written as on the command line after `--set KEY=` or after the option.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import parse_toml
from lorrery.service.names import cut, quoted

__all__ = ["MOST_POINTS", "Axis", "Value", "combinations", "parse_axes"]

Value = int | float | str
"""A value in a table."""

MOST_POINTS = 100_000
"""In one sweep: more means that a range has one digit too many."""

_MAX_DIGITS = 18
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Axis:
    """One swept key.

    Attributes:
        texts: its values as on the command line, in order, without duplicates.
        values: the values as numbers, if all are numbers.
    """

    key: str
    texts: tuple[str, ...]
    values: tuple[Value, ...]

    @property
    def is_numeric(self) -> bool:
        """Whether its values are numbers, and can be an axis of a plot."""
        return not isinstance(self.values[0], str)


def parse_axes(sweeps: Iterable[str]) -> tuple[Axis, ...]:
    """Parse the `KEY=VALUES` of a command line.

    Raises:
        SettingsError: not of that form, a key or a value twice, or too many points; names the key.
    """
    axes: dict[str, Axis] = {}
    for text in sweeps:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not key or not values.strip():
            raise SettingsError(f"--sweep {cut(text)}: expected KEY=VALUE,VALUE,...")
        if key in axes:
            raise SettingsError(f"--sweep {cut(key)}: given twice; list all its values in one")
        texts = _texts(key, values.strip())
        typed = _typed(texts)
        if len(set(typed)) < len(typed):
            raise SettingsError(f"--sweep {cut(key)}: {cut(values.strip())} has a value twice")
        axes[key] = Axis(key, texts, typed)
    num_points = math.prod(len(axis.texts) for axis in axes.values())
    if num_points > MOST_POINTS:
        raise SettingsError(f"--sweep {cut(', '.join(axes))}: {num_points:,} points; {MOST_POINTS:,} is the most")
    return tuple(axes.values())


def combinations(axes: Iterable[Axis]) -> Iterator[tuple[int, ...]]:
    """Yield the cross product: for each point the index of each axis' value; the last axis varies fastest."""
    yield from itertools.product(*(range(len(axis.texts)) for axis in axes))


def _texts(key: str, values: str) -> tuple[str, ...]:
    if values.startswith("["):
        try:
            array: list[Any] = parse_toml(f"values = {values}")["values"]
        except ValueError as error:
            raise SettingsError(f"--sweep {cut(key)}: {quoted(values)}: not an array of values: {error}") from None
        return tuple(value if isinstance(value, str) else json.dumps(value, default=str) for value in array)
    texts: list[str] = []
    for part in (part.strip() for part in values.split(",")):
        if not part:
            raise SettingsError(f"--sweep {cut(key)}: {quoted(values)} has an empty value")
        bounds = _RANGE.fullmatch(part)
        texts.extend([part] if bounds is None else _range(key, part, *bounds.groups(default="1")))
    return tuple(texts)


def _range(key: str, text: str, first: str, last: str, step: str) -> list[str]:
    if max(map(len, (first, last, step))) > _MAX_DIGITS:
        raise SettingsError(f"--sweep {cut(key)}: {quoted(text)}: a number has more than {_MAX_DIGITS} digits")
    numbers = range(int(first), int(last) + 1, int(step) or 1)
    if int(last) < int(first):
        raise SettingsError(f"--sweep {cut(key)}: {text} runs backwards; write {last}..{first}, or list the values")
    if step == "0":
        raise SettingsError(f"--sweep {cut(key)}: {text}: expected LOW..HIGH or LOW..HIGH..STEP")
    if len(numbers) > MOST_POINTS:
        raise SettingsError(f"--sweep {cut(key)}: {text}: {len(numbers):,} values; {MOST_POINTS:,} is the most")
    return [str(number) for number in numbers]


def _typed(texts: tuple[str, ...]) -> tuple[Value, ...]:
    kinds: tuple[type[int] | type[float], ...] = (int, float)
    for kind in kinds:
        try:
            numbers = tuple(kind(text) for text in texts)
        except ValueError:
            continue
        if all(map(math.isfinite, numbers)):
            return numbers
    return texts
