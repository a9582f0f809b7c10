"""How settings are read: one TOML file, the environment and the command line, into a model of any shape.

Precedence: defaults < file < environment (`LORRERY_SCHEDULER__MAX_NUM_SEQS=64`) < command line (`--set
scheduler.max_num_seqs=64`). A key that does not exist, or a value that cannot be, is a `SettingsError` that names the
key. What one file holds is `lorrery.settings`' matter; what a section holds is its owner's.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as SourceError

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.sections import LogSettings, TlsSettings

ENV_PREFIX = "LORRERY_"
API_KEY_VARIABLE = "LORRERY_API_KEY"
"""Where clients look for their key."""
_NOT_SETTINGS = {"LORRERY_CONFIG", "LORRERY_SHARED", API_KEY_VARIABLE}
_MAX_SHOWN = 80


def setting_variables() -> list[str]:
    """Return the environment variables that are to be settings."""
    return [name for name in os.environ if name.startswith(ENV_PREFIX) and name not in _NOT_SETTINGS]


class _StrictEnv(EnvSettingsSource):
    """The environment, in which a `LORRERY_` name that is no setting is an error, and so is a value that is no JSON."""

    def __call__(self) -> dict[str, Any]:
        for name in setting_variables():
            section = name.removeprefix(ENV_PREFIX).split("__")[0].lower()
            if section not in self.settings_cls.model_fields:
                raise SettingsError(f"environment variable {name} names no setting")
        try:
            return super().__call__()
        except SourceError:
            raise self._malformed() from None

    def _malformed(self) -> SettingsError:
        """Find the variable whose value cannot be read; pydantic tells its section only."""
        for name in setting_variables():
            value = os.environ[name]
            self.env_vars = {name.lower(): value}
            try:
                super().__call__()
            except SourceError:
                form = self._form(name)
                return SettingsError(f"environment variable {name}: {form} expected, got {value!r}")
        return SettingsError("environment: a value cannot be read")

    def _form(self, name: str) -> str:
        """Say what a variable's value must look like."""
        kind: Any = self.settings_cls
        for part in name.removeprefix(ENV_PREFIX).lower().split("__"):
            kind = kind.model_fields[part].annotation
            if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
                return f"""a JSON list such as '{'["HOST:PORT"]' if part == "schedulers" else "[...]"}'"""
        return f"a JSON object, or one setting of it as {name}__SETTING"


class FileSettings(BaseSettings):
    """The whole of a settings file; derive from it, and read with `load`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take only what is given: `load` merges file, environment and command line, and must know what came whence."""
        return (init_settings,)


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
    if path is None and (name := os.environ.get("LORRERY_CONFIG")):
        path = Path(name)
    from_command_line: dict[str, Any] = {}
    for override in overrides:
        _merge(from_command_line, _parse_override(override))
    sources = (
        (f"file {path}", _read_toml(path) if path is not None else {}),
        ("environment", _StrictEnv(model)()),
        ("--set", from_command_line),
    )
    merged: dict[str, Any] = {}
    for _, source in sources:
        _merge(merged, source)
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        what = _in_words(error)
    raise SettingsError(f"{what} ({_culprit(model, what, sources)})")


def changed(model: type[S], content: S | Mapping[str, Any], overrides: Mapping[str, object] | Iterable[str] = ()) -> S:
    """Return settings with some values changed; neither the file nor the environment is looked at.

    Args:
        model: of the whole file.
        content: settings, or the tables of a settings file; what they lack has its default.
        overrides: `{"section.key": value}`, or strings as `load` takes them.

    Raises:
        SettingsError: an unknown key or an impossible value; names the key.
    """
    merged: dict[str, Any] = {}
    given = content.model_dump(exclude_unset=True) if isinstance(content, FileSettings) else deepcopy(dict(content))
    _merge(merged, given)
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _merge(merged, _nested(key, value))
    else:
        for override in overrides:
            _merge(merged, _parse_override(override))
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(_in_words(error)) from None


def _in_words(error: ValidationError) -> str:
    """Say the first thing that is wrong: the key, what is expected, and the value."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "settings"
    if first["type"] == "extra_forbidden":
        return f"{key}: no such setting"
    message, value = first["msg"], first["input"]
    # Our own messages tell the values that matter; where a key is missing, the value would be its whole section.
    if first["type"] in ("value_error", "missing"):
        return f"{key}: {message.removeprefix('Value error, ')}"
    shown = repr(value)
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    return f"{key}: {message}, got {shown}"


def _culprit(model: type[S], what: str, sources: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Name the source with which the settings first have this fault; each may only be wrong beside those before it."""
    merged: dict[str, Any] = {}
    for name, source in sources:
        _merge(merged, source)
        try:
            model.model_validate(merged)
        except ValidationError as error:
            if _in_words(error) == what:
                return name
    raise AssertionError("all sources together have the fault")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from None


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"--set {text}: expected section.key=value")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return _nested(key.strip(), parsed)


def _nested(key: str, value: object) -> dict[str, Any]:
    """Return the tables that hold one value: `a.b` and 1 become `{"a": {"b": 1}}`."""
    first, dot, rest = key.partition(".")
    return {first: _nested(rest, value) if dot else value}


def _merge(into: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value if not isinstance(value, Mapping) else dict(value)
