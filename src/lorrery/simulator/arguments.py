"""Checks the types of what Python callers pass to `lorrery.simulate` and `lorrery.plan`; commands have a parser.

NumPy numbers are accepted and converted to Python's, because compiled code takes no others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from lorrery.loadgen.options import LoadOptions
from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import Fault, parse_fault
from lorrery.service.names import cut
from lorrery.service.options import Option, options_of

__all__ = [
    "check_callable",
    "read_faults",
    "read_flag",
    "read_number",
    "read_options",
    "read_overrides",
    "read_path",
    "read_positive",
    "read_table",
    "read_texts",
    "read_whole",
    "read_wholes",
    "shown",
]


def read_whole(name: str, value: object, least: int) -> int:
    """Read a whole number.

    Raises:
        SettingsError: not a whole number, or less than `least`; names the argument.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise SettingsError(f"{name} is {shown(value)}; it must be a whole number, {least} or more")
    return int(value)


def read_wholes(name: str, values: object, least: int) -> tuple[int, ...]:
    """Read one or more whole numbers; a NumPy array counts as a list.

    Raises:
        SettingsError: not such a list; names the argument and the index.
    """
    found = _listed(name, values, "[8, 16]")
    if not found:
        raise SettingsError(f"{name} is empty; it must have at least one whole number, {least} or more")
    return tuple(read_whole(f"{name}[{place}]", value, least) for place, value in enumerate(found))


def read_number(name: str, value: object, least: float) -> float:
    """Read a finite number.

    Raises:
        SettingsError: not finite, or less than `least`; names the argument.
    """
    number = _number(name, value)
    if not least <= number < math.inf:
        raise SettingsError(f"{name} is {number:g}; it must be {least:g} or more, and finite")
    return number


def read_positive(name: str, value: object) -> float:
    """Read a finite number above 0.

    Raises:
        SettingsError: not such a number; names the argument.
    """
    number = _number(name, value)
    if not 0 < number < math.inf:
        raise SettingsError(f"{name} is {number:g}; it must be more than 0, and finite")
    return number


def _number(name: str, value: object) -> float:
    if not _is_number(value):
        raise SettingsError(f"{name} is {shown(value)}; it must be a number")
    try:
        return float(value)  # type: ignore[arg-type]  # as just checked
    except OverflowError:
        return math.copysign(math.inf, 1 if value > 0 else -1)  # type: ignore[operator]


def read_path(name: str, path: object) -> Path:
    """Read a path.

    Raises:
        SettingsError: not a path, or one that no file can have; names the argument.
    """
    if not isinstance(path, str | Path) or "\0" in str(path):
        raise SettingsError(f"{name} is {shown(path)}; it must be the path of a file, as text or as a Path")
    return Path(path)


def check_callable(name: str, given: object) -> None:
    """Check that a callback is callable or None.

    Raises:
        SettingsError: it is neither; names the argument.
    """
    if given is not None and not callable(given):
        raise SettingsError(f"{name} is {shown(given)}; it must be a function, or None")


def read_overrides(overrides: object) -> Mapping[str, object] | list[str]:
    """Return single settings that override all others, as a mapping or a list of texts.

    Raises:
        SettingsError: they are neither.
    """
    if isinstance(overrides, Mapping):
        for key in overrides:
            if not isinstance(key, str):
                raise SettingsError(f"overrides: {shown(key)} is no key; keys are text such as 'scheduler.policy'")
        return overrides
    texts = _listed("overrides", overrides, "['scheduler.policy=fcfs']")
    for text in texts:
        if not isinstance(text, str):
            raise SettingsError(f"overrides has {shown(text)}; expected text such as 'scheduler.policy=fcfs'")
    return texts


def read_faults(name: str, faults: object) -> tuple[Fault, ...]:
    """Read faults.

    Raises:
        SettingsError: not a list of texts or of `Fault`, or one is invalid.
    """
    read = []
    for fault in _listed(name, faults, "['worker_loss,at=30,worker=worker-1,for=10']"):
        if not isinstance(fault, str | Fault):
            raise SettingsError(f"{name} has {shown(fault)}; expected text such as 'worker_loss,at=30,for=10'")
        read.append(fault if isinstance(fault, Fault) else parse_fault(fault))
    return tuple(read)


def read_flag(name: str, value: object) -> bool:
    """Read a boolean; compiled code takes neither a number nor NumPy's for it.

    Raises:
        SettingsError: not a boolean; names the argument.
    """
    if isinstance(value, np.bool_):
        return bool(value)
    if not isinstance(value, bool):
        raise SettingsError(f"{name} is {shown(value)}; it must be True or False")
    return value


T = TypeVar("T")


def read_table(options: T) -> T:
    """Check the values of a table of options (`service.options`), and convert NumPy numbers.

    Raises:
        SettingsError: a value of another type, or out of bounds; names the option.
    """
    hints = get_type_hints(type(options))
    values = {
        name: _read_option(name, getattr(options, name), option, _kinds(hints[name]))
        for name, option in options_of(type(options)).items()
    }
    return replace(options, **values)  # type: ignore[type-var]  # a dataclass


def _read_option(name: str, value: object, option: Option, kinds: Sequence[Any]) -> object:
    if value is None and NoneType in kinds:
        return None
    if option.read is not None:
        return option.read(name, value)
    if bool in kinds:
        return read_flag(name, value)
    least = option.least or 0
    if int in kinds:
        return read_whole(name, value, int(least))
    if float in kinds:
        return read_number(name, value, least) if option.above is None else read_positive(name, value)
    assert Sequence[int] in kinds, name
    return read_wholes(name, value, int(least))


def read_texts(values: dict[str, Any]) -> None:
    """Convert, in place, options given as text to the numbers they denote, as on the command line.

    Text that is not a number stays, and `read_options` refuses it.
    """
    for name, hint in get_type_hints(LoadOptions).items():
        value, kinds = values.get(name), _kinds(hint)
        if not isinstance(value, str) or str in kinds:
            continue
        for kind in (int, float):
            if kind in kinds:
                with suppress(ValueError):
                    values[name] = kind(value)
                    break


def read_options(options: LoadOptions) -> LoadOptions:
    """Check the type of each workload option, and convert NumPy numbers.

    Raises:
        SettingsError: a value of another type; names the option.
    """
    for name, hint in get_type_hints(LoadOptions).items():
        value, kinds = getattr(options, name), _kinds(hint)
        if not any(_is_kind(value, kind) for kind in kinds):
            wanted = [_WORDS.get(kind) or "None" for kind in kinds if get_origin(kind) is not Literal]
            names = [repr(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
            expected = " or ".join([*wanted, *names])
            raise SettingsError(f"workload: {name} is {shown(value)}; it must be {expected}")
    plain: dict[str, Any] = {field.name: _plain(getattr(options, field.name)) for field in fields(options)}
    return replace(options, **plain)


_WORDS: Mapping[object, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    tuple[int, int]: "two whole numbers, from and to",
}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _kinds(hint: object) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)


def _is_kind(value: object, kind: object) -> bool:
    if kind is int:
        return _is_whole(value)
    if kind is float:
        return _is_number(value)
    if kind == tuple[int, int]:
        return isinstance(value, tuple) and len(value) == 2 and all(map(_is_whole, value))
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _listed(name: str, values: object, example: str) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SettingsError(f"{name} is {shown(values)}; expected a list, such as {example}")
    return list(values)


def shown(value: object) -> str:
    """Return a value as text for a message."""
    return cut(repr(value))
