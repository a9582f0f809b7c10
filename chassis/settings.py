"""The settings of a cluster: one TOML file, read by every service and command.

Precedence: defaults < file < environment (`LORRERY_SCHEDULER__MAX_NUM_SEQS=64`) < command line (`--set
scheduler.max_num_seqs=64`). A key that does not exist, or a value that cannot be, is a `SettingsError` that names the
key. Names follow S-LoRA (`max_total_token_num`, `batch_max_tokens`, `running_max_req_size`, `max_req_input_len`,
`max_req_total_len`) and vLLM (`max_num_seqs`, `max_num_batched_tokens`, `max_loras`, `block_size`).

`chassis.sections` lists the settings themselves.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as SourceError

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.faults import LOAD_FAILURE, Fault, check_faults, parse_fault
from lorrery.chassis.sections import (
    AdapterSettings,
    LogSettings,
    LoraSettings,
    OutputSettings,
    PositiveSeconds,
    RouterSettings,
    SchedulerSettings,
    TlsSettings,
    WorkerSettings,
)
from lorrery.vocabulary.units import NEVER

__all__ = [
    "AdapterSettings",
    "LogSettings",
    "LoraSettings",
    "OutputSettings",
    "RouterSettings",
    "SchedulerSettings",
    "Settings",
    "TlsSettings",
    "WorkerSettings",
    "changed",
    "load",
]

FORMAT = 1
"""Version of the settings file's format."""

ENV_PREFIX = "LORRERY_"
_NOT_SETTINGS = {"LORRERY_CONFIG", "LORRERY_SHARED"}
_MAX_SHOWN = 80


class _StrictEnv(EnvSettingsSource):
    """The environment, in which a `LORRERY_` name that is no setting is an error, and so is a value that is no JSON."""

    def __call__(self) -> dict[str, Any]:
        for name in os.environ:
            if name.startswith(ENV_PREFIX) and name not in _NOT_SETTINGS:
                section = name.removeprefix(ENV_PREFIX).split("__")[0].lower()
                if section not in self.settings_cls.model_fields:
                    raise SettingsError(f"environment variable {name} names no setting")
        try:
            return super().__call__()
        except SourceError:
            raise self._malformed() from None

    def _malformed(self) -> SettingsError:
        """Find the variable whose value cannot be read; pydantic tells its section only."""
        for name, value in os.environ.items():
            if not name.startswith(ENV_PREFIX) or name in _NOT_SETTINGS:
                continue
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


class Settings(BaseSettings):
    """A whole cluster. Read it with `load`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    format: int = Field(default=FORMAT, description="version of this file's format")
    model: str = Field(
        default="Llama-2-7B", description="base model of the whole cluster, by its name in the catalogue"
    )
    catalogue: tuple[Path, ...] = Field(default=(), description="TOML files with further GPUs, models, engines")
    time_scale: PositiveSeconds = Field(default=1.0, description="2 = everything takes twice as long")
    faults: tuple[str, ...] = Field(
        default=(), description="what goes wrong on schedule, such as 'slow_worker,at=30,worker=worker-0,factor=2'"
    )
    adapters: AdapterSettings = AdapterSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    worker: WorkerSettings = WorkerSettings()
    router: RouterSettings = RouterSettings()
    server_tls: TlsSettings = TlsSettings()
    client_tls: TlsSettings = TlsSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _known_format(self) -> Self:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known; this version reads format {FORMAT}")
        return self

    @model_validator(mode="after")
    def _possible_faults(self) -> Self:
        try:
            faults = self.planned_faults()
            check_faults(faults, adapters=(name for name, _ in self.adapters.expand()))
        except SettingsError as error:
            raise ValueError(str(error)) from None
        blocking = self.scheduler.strict or self.adapters.loading == "blocking"
        if blocking and any(fault.kind == LOAD_FAILURE and fault.until_ps == NEVER for fault in faults):
            raise ValueError("fault adapter_load_failure without for: a prefill that waits for the load never runs")
        return self

    @model_validator(mode="after")
    def _no_adapter_is_the_model(self) -> Self:
        if any(name == self.model for name, _ in self.adapters.expand()):
            raise ValueError(f"adapters.registry: adapter {self.model!r} has the base model's name; give it another id")
        return self

    @model_validator(mode="after")
    def _weights_have_adapters(self) -> Self:
        num_weights, num_adapters = len(self.scheduler.fair_weights), sum(1 for _ in self.adapters.expand())
        if isinstance(self.scheduler.fair_weights, tuple) and num_weights > num_adapters:
            raise ValueError(
                f"scheduler.fair_weights has {num_weights} weights; the registry has {num_adapters} adapters"
            )
        return self

    def planned_faults(self) -> tuple[Fault, ...]:
        """Return the faults that are to happen."""
        return tuple(map(parse_fault, self.faults))

    def fair_weights(self) -> dict[str, Fraction]:
        """Return the weights that are set, by adapter; decimal fractions are taken as written."""
        weights = self.scheduler.fair_weights
        by_adapter = (
            weights.items()
            if isinstance(weights, dict)
            else zip((name for name, _ in self.adapters.expand()), weights, strict=False)
        )
        return {name: Fraction(str(weight)) for name, weight in by_adapter}

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


def load(path: Path | None = None, overrides: Iterable[str] = ()) -> Settings:
    """Read the settings.

    Args:
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
        ("environment", _StrictEnv(Settings)()),
        ("--set", from_command_line),
    )
    merged: dict[str, Any] = {}
    for _, source in sources:
        _merge(merged, source)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        what = _in_words(error)
    raise SettingsError(f"{what} ({_culprit(what, sources)})")


def changed(content: Settings | Mapping[str, Any], overrides: Mapping[str, object] | Iterable[str] = ()) -> Settings:
    """Return settings with some values changed; neither the file nor the environment is looked at.

    Args:
        content: settings, or the tables of a settings file; what they lack has its default.
        overrides: `{"section.key": value}`, or strings as `load` takes them.

    Raises:
        SettingsError: an unknown key or an impossible value; names the key.
    """
    merged: dict[str, Any] = {}
    _merge(merged, content.model_dump(exclude_unset=True) if isinstance(content, Settings) else deepcopy(dict(content)))
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _merge(merged, _nested(key, value))
    else:
        for override in overrides:
            _merge(merged, _parse_override(override))
    try:
        return Settings.model_validate(merged)
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


def _culprit(what: str, sources: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Name the source with which the settings first have this fault; each may only be wrong beside those before it."""
    merged: dict[str, Any] = {}
    for name, source in sources:
        _merge(merged, source)
        try:
            Settings.model_validate(merged)
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
