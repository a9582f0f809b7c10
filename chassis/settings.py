"""How settings are read: one TOML file, the environment and the command line, into a model of any shape.

Precedence: defaults < file < environment (`LORRERY_SCHEDULER__MAX_NUM_SEQS=64`) < command line (`--set
scheduler.max_num_seqs=64`). A key that does not exist, or a value that cannot be, is a `SettingsError` that names the
key. A layer may name a preset, whose values stand directly below its own. What one file holds is `lorrery.settings`'
matter; what a section holds is its owner's.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.names import cut, quoted
from lorrery.chassis.nearest_setting import nearest_setting
from lorrery.chassis.sections import LogSettings, Section, TlsSettings
from lorrery.chassis.toml import parse_toml, read_toml
from lorrery.chassis.variables import ENV_PREFIX, setting_variables

_MAX_SHOWN = 80
_MAX_PARTS = 32
"""Of a key; none has nearly as many, and each is a table in a table."""
Key = tuple[str, ...]
"""Of a setting: the names of the tables that it is in, and its own."""


class FileSettings(Section):
    """The whole of a settings file; derive from it, and read with `load`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def of_layers(cls, layers: Sequence[Mapping[str, Any]]) -> Self:
        """Make settings of layers, the later ones win; `changed` puts others above them.

        Raises:
            ValidationError: an unknown key or an impossible value.
            SettingsError: a preset that is not known.
        """
        made = cls.model_validate(_merged(cls, layers)[0])
        object.__setattr__(made, "layers", tuple(layers))  # in place of what the property would find; frozen
        return made

    @cached_property
    def layers(self) -> tuple[Mapping[str, Any], ...]:
        """What these settings were made of, presets left out."""
        return (self.model_dump(exclude_unset=True),)

    @classmethod
    def preset(
        cls, layer: Mapping[str, Any], given: Mapping[str, Any], later: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        """Return the preset that a layer names (what names it, for messages), and what that sets below the layer.

        Args:
            layer: one source's tables.
            given: what all layers set.
            later: what this layer and those above it set.

        Raises:
            SettingsError: no such preset.
        """
        del layer, given, later
        return "", {}

    @classmethod
    def without_effect(cls, layers: Sequence[Mapping[str, Any]]) -> str | None:
        """Say which value of these layers can have no effect, and why; None: each has."""
        del layers
        return None


S = TypeVar("S", bound=FileSettings)


class ProcessSettings(Protocol):
    """What a process needs of the settings for itself."""

    @property
    def server_tls(self) -> TlsSettings:
        """Of its gRPC server."""
        ...

    @property
    def log(self) -> LogSettings:
        """What it logs, and how."""
        ...


def load(model: type[S], path: Path | None = None, overrides: Iterable[str] = ()) -> S:
    """Read the settings.

    Args:
        model: of the whole file.
        path: TOML file; unset: `LORRERY_CONFIG`, and if that is unset too, defaults only.
        overrides: `section.key=value` strings; the value is TOML, or a bare string.

    Raises:
        SettingsError: a file that cannot be read, an unknown key or format, an impossible value; names the file, the
            environment or `--set`, whichever it came with.
    """
    sources = _sources(model, path, overrides)
    layers = [layer for _, layer in sources]
    why = _why_not(model, layers)
    if why is None:
        return model.of_layers(layers)
    # Each source may only be wrong beside those before it: the first one with which there is this fault.
    culprit = next(name for number, (name, _) in enumerate(sources, 1) if _why_not(model, layers[:number]) == why)
    raise SettingsError(f"{why} ({'; '.join([culprit, *_preset_parts(model, layers, why)])})")


def origins(model: type[FileSettings], path: Path | None = None, overrides: Iterable[str] = ()) -> dict[Key, str]:
    """Return where each value comes from that is not a default: key -> preset, file, environment or `--set`.

    Args:
        model: of the whole file.
        path: as for `load`.
        overrides: as for `load`.

    Raises:
        SettingsError: as `load`.
    """
    sources = _sources(model, path, overrides)
    found: dict[Key, str] = {}
    variables = {name.upper(): name for name in setting_variables()}
    for name, layer in sources:
        for key, _ in leaves(layer):
            variable = variables.get(f"{ENV_PREFIX}{'__'.join(key)}".upper())
            found[key] = f"{name} {variable}" if name == "environment" and variable else name
    # What is left of a preset is above all that stands below it.
    presets = _merged(model, [layer for _, layer in sources])[1]
    return found | {key: preset for key, (preset, _) in presets.items()}


def _sources(
    model: type[FileSettings], path: Path | None, overrides: Iterable[str]
) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Read file, environment and command line: name and tables of each, the later ones win."""
    if path is None and (name := os.environ.get("LORRERY_CONFIG")):
        path = Path(name)
    from_command_line: dict[str, Any] = {}
    for override in overrides:
        merge(from_command_line, _parse_override(override))
    return (
        (f"file {path}", read_toml(path) if path is not None else {}),
        ("environment", _environment(model)),
        ("--set", from_command_line),
    )


def _environment(model: type[FileSettings]) -> dict[str, Any]:
    if not setting_variables():
        return {}
    from lorrery.chassis.environment import read_environment

    return read_environment(model)


def changed(model: type[S], content: S | Mapping[str, Any], overrides: Mapping[str, object] | Iterable[str] = ()) -> S:
    """Return settings with some values changed; neither the file nor the environment is looked at.

    Args:
        model: of the whole file.
        content: settings, or the tables of a settings file; what they lack has its default.
        overrides: `{"section.key": value}`, or strings as `load` takes them.

    Raises:
        SettingsError: an unknown key or an impossible value; names the key.
    """
    layers = list(content.layers) if isinstance(content, FileSettings) else [deepcopy(dict(content))]
    last: dict[str, Any] = {}
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            merge(last, nested(key, value))
    else:
        for override in overrides:
            merge(last, _parse_override(override))
    layers.append(last)
    if (why := _why_not(model, layers)) is not None:
        parts = _preset_parts(model, layers, why)
        raise SettingsError(f"{why} ({'; '.join(parts)})" if parts else why)
    return model.of_layers(layers)


def _why_not(model: type[S], layers: Sequence[Mapping[str, Any]], without: Key = ()) -> str | None:
    """Return what is wrong with settings of these layers, without what a preset gives one of them; None: nothing."""
    try:
        merged = _merged(model, layers)[0]
        if without:
            _drop(merged, without)
        model.model_validate(merged)
        return model.without_effect(layers)
    except ValidationError as error:
        return in_words(error, known_settings(model))
    except SettingsError as error:
        return str(error)


def _preset_parts(model: type[S], layers: Sequence[Mapping[str, Any]], why: str) -> list[str]:
    """Return the values of presets that are part of a fault: it goes away without them, or changes and names them."""
    try:
        preset_values = _merged(model, layers)[1]
    except SettingsError:
        return []
    found: list[str] = []
    for key, (preset, value) in preset_values.items():
        without = _why_not(model, layers, without=key)
        named = key[-1] in why or (isinstance(value, str) and value in why)
        if without is None or (without != why and named):
            found.append(f"{preset} sets {'.'.join(key)} = {value!r}")
    return found


def _merged(
    model: type["FileSettings"], layers: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[Key, tuple[str, object]]]:
    """Merge layers, each above those before it and above the preset that it names.

    Returns the settings, and of those that are a preset's: key -> (preset, value).
    """
    given: dict[str, Any] = {}
    for layer in layers:
        merge(given, layer)
    merged: dict[str, Any] = {}
    preset_values: dict[Key, tuple[str, object]] = {}
    for number, layer in enumerate(layers):
        later: dict[str, Any] = {}
        for other in layers[number:]:
            merge(later, other)
        name, preset = model.preset(layer, given, later)
        preset_values |= {key: (name, value) for key, value in leaves(preset)}
        for key, _ in leaves(layer):
            preset_values.pop(key, None)
        merge(merged, preset)
        merge(merged, layer)
    return merged, preset_values


def leaves(tables: Mapping[str, Any], within: Key = ()) -> Iterator[tuple[Key, object]]:
    """Yield (key, value) of all that is no table, and of empty tables."""
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*within, name))
        else:
            yield (*within, name), value


def _drop(tables: dict[str, Any], key: Key) -> None:
    """Take a value out of tables."""
    *sections, last = key
    for section in sections:
        tables = tables[section]
    del tables[last]


def known_settings(model: type[BaseModel]) -> list[Key]:
    """Return the keys of a model, all of which has defaults."""
    return [key for key, _ in leaves(model.model_construct().model_dump(warnings=False))]


def in_words(error: ValidationError, known: Iterable[Key] = (), within: Key = ()) -> str:
    """Say the first thing that is wrong: the key, what is expected, and the value.

    Args:
        error: what pydantic found.
        known: settings that there are; one that there is not is told with the nearest of them.
        within: where what was read stands, for the key.
    """
    errors = error.errors()
    # A value that may have several forms has an error for each: of the form that it comes nearest to, the deepest.
    first = max((one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]), key=lambda one: len(one["loc"]))
    place = [*within, *map(str, first["loc"])]
    key = ".".join(part for part in place if "[" not in part) or "settings"  # not the form's name
    if first["type"] == "extra_forbidden":
        near = nearest_setting(place, known)
        return f"{key}: no such setting" + (f"; did you mean {near}?" if near else "")
    message, value = first["msg"], first["input"]
    # Our own messages tell the values that matter; where a key is missing, the value would be its whole section.
    if first["type"] in ("value_error", "missing"):
        return f"{key}: {message.removeprefix('Value error, ')}"
    shown = repr(value)
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    return f"{key}: {message}, got {shown}"


def override_of(key: str, value: str | int) -> str:
    """Write a value for --set; a string is bare unless TOML would take it for something else."""
    if isinstance(value, str):
        try:
            parse_toml(f"value = {value}")
        except tomllib.TOMLDecodeError:
            return f"{key}={value}"
        except ValueError:  # TOML, but more than the parser takes
            pass
    return f"{key}={json.dumps(value)}"


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"--set {cut(text)}: expected section.key=value")
    try:
        parsed: Any = parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    except ValueError as error:
        raise SettingsError(f"--set {quoted(key)}: {error}") from None
    return nested(key.strip(), parsed)


def nested(key: str, value: object) -> dict[str, Any]:
    """Return the tables that hold one value: `a.b` and 1 become `{"a": {"b": 1}}`.

    Raises:
        SettingsError: a key of more parts than any has.
    """
    *outer, last = key.split(".")
    if len(outer) >= _MAX_PARTS:
        raise SettingsError(f"{quoted(key)}: no such setting: it has {len(outer) + 1} parts; at most {_MAX_PARTS}")
    tables: dict[str, Any] = {last: value}
    for part in reversed(outer):
        tables = {part: tables}
    return tables


def merge(into: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Put tables above others: single values win, tables of the same name are merged."""
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value if not isinstance(value, Mapping) else dict(value)
