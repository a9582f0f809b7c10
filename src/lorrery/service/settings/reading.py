"""Reads settings from one TOML file, the environment and the command line into a pydantic model.

Precedence: defaults < file < environment (`LORRERY_SCHEDULER__MAX_NUM_SEQS=64`) < command line (`--set
scheduler.max_num_seqs=64`). An unknown key or an invalid value is a `SettingsError` that names the key. A layer may
name a preset, whose values rank directly below its own. The model of the file is in `lorrery.service.settings`; each
section's model belongs to its service.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import parse_toml, read_toml
from lorrery.service.names import cut, quoted
from lorrery.service.settings.sections import LogSettings, Section, TlsSettings

ENV_PREFIX = "LORRERY_"
_NOT_SETTINGS = {"LORRERY_CONFIG", "LORRERY_SHARED", "LORRERY_API_KEY"}
_MAX_SHOWN = 80
_MAX_PARTS = 32
"""Upper bound on the parts of a key, far above any real one; each part is a nested table."""
_MAX_TYPED = 100
"""A longer key is no typing error, and comparing it is slow."""
Key = tuple[str, ...]
"""Key of a setting: the names of the enclosing tables, and its own."""


class FileSettings(Section):
    """The whole of a settings file; derive from it, and read with `load`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def of_layers(cls, layers: Sequence[Mapping[str, Any]]) -> Self:
        """Build settings from layers, of which later ones take precedence; `changed` adds a layer on top.

        Raises:
            ValidationError: an unknown key or an invalid value.
            SettingsError: an unknown preset.
        """
        made = cls.model_validate(_merged(cls, layers)[0])
        object.__setattr__(made, "layers", tuple(layers))  # replaces the cached property; the model is frozen
        return made

    @cached_property
    def layers(self) -> tuple[Mapping[str, Any], ...]:
        """The layers that these settings were built from, without presets."""
        return (self.model_dump(exclude_unset=True),)

    @classmethod
    def preset(
        cls, layer: Mapping[str, Any], given: Mapping[str, Any], later: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        """Return the preset that a layer names (description for messages) and the values that it sets below the layer.

        Args:
            layer: one source's tables.
            given: merged values of all layers.
            later: merged values of this layer and those above it.

        Raises:
            SettingsError: no such preset.
        """
        del layer, given, later
        return "", {}

    @classmethod
    def without_effect(cls, layers: Sequence[Mapping[str, Any]]) -> str | None:
        """Return which value of these layers can have no effect, and why; None: all have."""
        del layers
        return None


S = TypeVar("S", bound=FileSettings)


class ProcessSettings(Protocol):
    """The settings that a process itself needs."""

    @property
    def server_tls(self) -> TlsSettings:
        """TLS of its gRPC server."""
        ...

    @property
    def allowed_hosts(self) -> Sequence[str]:
        """Names under which its HTTP servers answer."""
        ...

    @property
    def log(self) -> LogSettings:
        """Level and format of its log."""
        ...


def load(model: type[S], path: Path | None = None, overrides: Iterable[str] = ()) -> S:
    """Read the settings.

    Args:
        model: of the whole file.
        path: TOML file; unset: `LORRERY_CONFIG`, and if that is unset too, defaults only.
        overrides: `section.key=value` strings; the value is TOML, or a bare string.

    Raises:
        SettingsError: a file cannot be read, or a key, format or value is invalid; names the file, the environment or
        `--set` as the origin.
    """
    sources = _sources(model, path, overrides)
    layers = [layer for _, layer in sources]
    why = _why_not(model, layers)
    if why is None:
        return model.of_layers(layers)
    # A source may be wrong only in combination with earlier ones: blame the first source with which this error appears.
    culprit = next(name for number, (name, _) in enumerate(sources, 1) if _why_not(model, layers[:number]) == why)
    raise SettingsError(f"{why} ({'; '.join([culprit, *_preset_parts(model, layers, why)])})")


def origins(model: type[FileSettings], path: Path | None = None, overrides: Iterable[str] = ()) -> dict[Key, str]:
    """Map each setting that is not a default to its origin: a preset, the file, the environment or `--set`.

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
    # Remaining preset values override everything below them.
    presets = _merged(model, [layer for _, layer in sources])[1]
    return found | {key: preset for key, (preset, _) in presets.items()}


def _sources(
    model: type[FileSettings], path: Path | None, overrides: Iterable[str]
) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Read file, environment and command line; return name and tables of each, in ascending precedence."""
    if path is None and (name := os.environ.get("LORRERY_CONFIG")):
        path = Path(name)
    from_command_line: dict[str, Any] = {}
    for override in overrides:
        merge(from_command_line, nested(*read_override(override)))
    return (
        (f"file {path}", read_toml(path) if path is not None else {}),
        ("environment", _environment(model)),
        ("--set", from_command_line),
    )


def setting_variables() -> list[str]:
    """Return the environment variables that are settings, in any case."""
    return [name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in _NOT_SETTINGS]


def _environment(model: type[BaseModel]) -> dict[str, Any]:
    """Return the settings in the environment, one table per section.

    Raises:
        SettingsError: a `LORRERY_` variable is no setting, or has invalid JSON where JSON is expected.
    """
    if not setting_variables():
        return {}
    from pydantic_settings import BaseSettings, EnvSettingsSource  # slow to import
    from pydantic_settings import SettingsError as SourceError

    for name in setting_variables():
        section = name[len(ENV_PREFIX) :].split("__")[0].lower()
        if section not in model.model_fields:
            raise SettingsError(f"environment variable {name} names no setting")
    # The source uses only fields and configuration, which any model has.
    source = EnvSettingsSource(cast("type[BaseSettings]", model), env_prefix=ENV_PREFIX, env_nested_delimiter="__")
    with suppress(SourceError):
        return source()
    for name in setting_variables():  # pydantic names only the section of the one that it cannot parse
        value = os.environ[name]
        source.env_vars = {name.lower(): value}
        try:
            source()
        except SourceError:
            raise SettingsError(f"environment variable {name}: {_form(model, name)} expected, got {value!r}") from None
    raise SettingsError("environment: a value cannot be read")


def _form(model: type[BaseModel], name: str) -> str:
    """Describe the expected form of a variable's value."""
    kind: Any = model
    for part in name[len(ENV_PREFIX) :].lower().split("__"):
        kind = kind.model_fields[part].annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return f"""a JSON list such as '{'["HOST:PORT"]' if part == "schedulers" else "[...]"}'"""
    return f"a JSON object, or one setting of it as {name}__SETTING"


def changed(model: type[S], content: S | Mapping[str, Any], overrides: Mapping[str, object] | Iterable[str] = ()) -> S:
    """Return settings with some values changed; reads neither the file nor the environment.

    Args:
        model: of the whole file.
        content: settings, or the tables of a settings file; missing values take defaults.
        overrides: `{"section.key": value}`, or strings as `load` takes them.

    Raises:
        SettingsError: an unknown key or an invalid value; names the key.
    """
    layers = list(content.layers) if isinstance(content, FileSettings) else [deepcopy(dict(content))]
    last: dict[str, Any] = {}
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            merge(last, nested(key, value))
    else:
        for override in overrides:
            merge(last, nested(*read_override(override)))
    layers.append(last)
    if (why := _why_not(model, layers)) is not None:
        parts = _preset_parts(model, layers, why)
        raise SettingsError(f"{why} ({'; '.join(parts)})" if parts else why)
    return model.of_layers(layers)


def _why_not(model: type[S], layers: Sequence[Mapping[str, Any]], without: Key = ()) -> str | None:
    """Return the error in these layers, optionally without the value of key `without`; None: no error."""
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
    """Return the preset values that contribute to an error: without them it disappears, or changes and names them."""
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
    """Merge layers, each over those before it and over the preset that it names.

    Returns the settings, and those of them that come from presets: key -> (preset, value).
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
    """Yield (key, value) for every value that is not a table, and for empty tables."""
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*within, name))
        else:
            yield (*within, name), value


def _drop(tables: dict[str, Any], key: Key) -> None:
    """Remove a value from nested tables, in place."""
    *sections, last = key
    for section in sections:
        tables = tables[section]
    del tables[last]


def known_settings(model: type[BaseModel]) -> list[Key]:
    """Return the keys of a model whose fields all have defaults."""
    return [key for key, _ in leaves(model.model_construct().model_dump(warnings=False))]


def in_words(error: ValidationError, known: Iterable[Key] = (), within: Key = ()) -> str:
    """Describe the first error: the key, what is expected, and the value.

    Args:
        error: from pydantic.
        known: existing settings; the nearest of them is suggested for an unknown one.
        within: prefix of the key.
    """
    errors = error.errors()
    # A value of a union type has an error for each member: report the deepest, whose member is the closest match.
    first = max((one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]), key=lambda one: len(one["loc"]))
    place = [*within, *map(str, first["loc"])]
    key = ".".join(part for part in place if "[" not in part) or "settings"  # without the name of the union's member
    if first["type"] == "extra_forbidden":
        near = nearest_setting(place, known)
        return f"{key}: no such setting" + (f"; did you mean {near}?" if near else "")
    message, value = first["msg"], first["input"]
    # Messages of our own name the relevant values; for a missing key, the input would be its whole section.
    if first["type"] in ("value_error", "missing"):
        return f"{key}: {message.removeprefix('Value error, ')}"
    shown = repr(value)
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    return f"{key}: {message}, got {shown}"


def nearest_setting(key: Sequence[str], known: Iterable[Sequence[str]]) -> str | None:
    """Return the setting or section closest to an unknown one; None: no match.

    A similar name in the same section is preferred over the same name in another section.

    Args:
        key: the unknown key, outer names first.
        known: the existing settings, likewise.
    """
    *outer, last = key
    if len(last) > _MAX_TYPED:
        return None
    keys = list(known)
    beside = {one[len(outer)]: None for one in keys if len(one) > len(outer) and list(one[: len(outer)]) == outer}
    if near := get_close_matches(last, beside, n=1):
        return ".".join((*outer, near[0]))
    return next((".".join(one) for one in keys if one[-1] == last), None)


def override_of(key: str, value: str | int) -> str:
    """Return a value as an argument of --set; a string stays bare unless TOML would parse it."""
    if isinstance(value, str):
        try:
            parse_toml(f"value = {value}")
        except tomllib.TOMLDecodeError:
            return f"{key}={value}"
        except ValueError:  # valid TOML, but beyond the parser's limits
            pass
    return f"{key}={json.dumps(value)}"


def key_of(override: str) -> str:
    """Return the setting that an argument of --set names."""
    return override.partition("=")[0].strip()


def read_override(text: str) -> tuple[str, Any]:
    """Return the setting that an argument of --set names, and its value.

    Raises:
        SettingsError: not of the form KEY=VALUE, or a value beyond the parser's limits.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"--set {cut(text)}: expected section.key=value")
    try:
        parsed: Any = parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    except ValueError as error:
        raise SettingsError(f"--set {quoted(key)}: {error}") from None
    return key.strip(), parsed


def nested(key: str, value: object) -> dict[str, Any]:
    """Return nested tables with one value: `a.b` and 1 become `{"a": {"b": 1}}`.

    Raises:
        SettingsError: the key has too many parts.
    """
    *outer, last = key.split(".")
    if len(outer) >= _MAX_PARTS:
        raise SettingsError(f"{quoted(key)}: no such setting: it has {len(outer) + 1} parts; at most {_MAX_PARTS}")
    tables: dict[str, Any] = {last: value}
    for part in reversed(outer):
        tables = {part: tables}
    return tables


def merge(into: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Merge tables into `into`, in place: values are replaced, tables of the same name are merged."""
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value if not isinstance(value, Mapping) else dict(value)
