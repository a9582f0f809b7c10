"""docs/settings.md: every setting with its default, its bounds and its meaning, walked from the `Settings` model.

The walk reads pydantic's field records and nothing else, so sections may be defined anywhere.
"""

import inspect
import types
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Le, MinLen
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from lab.reference.pages import DO_NOT_EDIT, paragraph, sentence, table
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.sections import KINDS, MAX_COUNT, flat, number_in_words

HEADINGS = ("setting", "default", "values", "meaning")

INTRODUCTION = """# Settings

{do_not_edit}

One TOML file describes a cluster. A setting has its default unless it is set in the file, the environment or on the
command line; later sources take precedence:

| | |
|---|---|
| file | `[scheduler]`, then `policy = "fcfs"` |
| environment | `LORRERY_SCHEDULER__POLICY=fcfs` |
| command line | `--set scheduler.policy=fcfs` |

An `engine` sets many at once ([engines.md](engines.md)). `lorrery config` prints the effective settings and where each
comes from. A line **`[section.below]`** in a table begins a section within the one above.

Unknown keys, values out of bounds and settings that exclude each other are refused with a message that names the key.
A number may be given as text (as in the environment), a whole number as `64.0`; `true` and `false` are not numbers.
Durations are in seconds of wall time, unless described as *device seconds*, which `time_scale` stretches.
Bytes and token counts are whole numbers, at most {most:,} unless stated otherwise; GB is 10^9 bytes.
""".format(do_not_edit=DO_NOT_EDIT.format("the settings' sections"), most=MAX_COUNT)

_KINDS: dict[object, str] = {str: "text", bool: "`true` or `false`", Path: "path"}


def settings_page() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for top, found in groupby(sections(Settings), lambda one: one[0].partition(".")[0]):
        rows: list[tuple[str, ...]] = []
        for name, section, fields in found:
            if name == top:
                lines += [f"## `[{name}]`", "", *paragraph(section.__doc__ or "")] if name else ["## Whole cluster", ""]
            else:
                rows.append((f"**`[{name}]`**", "", "", sentence(section.__doc__ or "")))
            rows += [_row(key, field) for key, field in fields.items()]
        lines += table(HEADINGS, rows)
    return "\n".join(lines).rstrip() + "\n"


def sections(model: type[BaseModel], name: str = "") -> Iterator[tuple[str, type[BaseModel], dict[str, FieldInfo]]]:
    """Yield (dotted name, class, its own settings) of a model and of all sections below it, in order."""
    nested = {key: found for key, field in model.model_fields.items() if (found := _section_of(field)) is not None}
    yield name, model, {key: field for key, field in model.model_fields.items() if not _is_section(field)}
    for key, section in nested.items():
        yield from sections(section, f"{name}.{key}" if name else key)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a section, or of the entries of a list of tables."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _row(key: str, field: FieldInfo) -> tuple[str, str, str, str]:
    return f"`{key}`", _default(field), _values(field.annotation, field.metadata), sentence(field.description or "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _literal(field.default)


def _literal(value: object) -> str:
    """Write a value as TOML does; unset ones have none."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str | Path):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`[{', '.join(_literal(one).strip('`') for one in value)}]`"
    return f"`{value}`"


def _values(kind: object, metadata: list[Any]) -> str:
    """Say which values a setting takes: kind, names, bounds."""
    metadata = flat(metadata)
    if (names := _names(metadata)) is not None:
        return names
    origin, arguments = get_origin(kind), get_args(kind)
    if annotations := getattr(kind, "__metadata__", ()):  # Annotated inside another type
        return _values(arguments[0], list(annotations))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_values(one, metadata) for one in arguments if one is not type(None))
    if origin is tuple:
        least = next((f"at least {one.min_length} " for one in metadata if isinstance(one, MinLen)), "")
        return f"list: {least}{_values(arguments[0], [])}"
    if origin is dict:
        return f"table: {_values(arguments[1], [])}"
    if kind is Any:
        return "any"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "tables as below"
    told = [one for one in metadata if one != Le(MAX_COUNT)]  # the introduction says it
    return number_in_words(kind, told) if kind in KINDS else _KINDS[kind]


def _names(metadata: list[Any]) -> str | None:
    """Return the names that a setting's validator knows (`_named`), where it has such."""
    for one in metadata:
        if isinstance(one, AfterValidator):
            known = inspect.getclosurevars(one.func).nonlocals
            if "names" in known:
                own = ", or `module:Class`" if known.get("plug_ins", True) else ""
                return ", ".join(f"`{name}`" for name in known["names"]) + own
    return None
