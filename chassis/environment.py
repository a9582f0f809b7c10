"""Reads settings from the environment. Imported only if a variable is set: pydantic-settings is slow to import."""

import os
from typing import Any, cast

from pydantic import BaseModel
from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings import SettingsError as SourceError

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.variables import ENV_PREFIX, setting_variables


def read_environment(model: type[BaseModel]) -> dict[str, Any]:
    """Return the settings in the environment, one table per section.

    Raises:
        SettingsError: a `LORRERY_` variable is no setting, or has invalid JSON where JSON is expected.
    """
    for name in setting_variables():
        section = name[len(ENV_PREFIX) :].split("__")[0].lower()
        if section not in model.model_fields:
            raise SettingsError(f"environment variable {name} names no setting")
    # The source uses only fields and configuration, which any model has.
    source = EnvSettingsSource(cast("type[BaseSettings]", model), env_prefix=ENV_PREFIX, env_nested_delimiter="__")
    try:
        return source()
    except SourceError:
        raise _malformed(model, source) from None


def _malformed(model: type[BaseModel], source: EnvSettingsSource) -> SettingsError:
    """Return the error for the variable that cannot be parsed; pydantic names only its section."""
    for name in setting_variables():
        value = os.environ[name]
        source.env_vars = {name.lower(): value}
        try:
            source()
        except SourceError:
            return SettingsError(f"environment variable {name}: {_form(model, name)} expected, got {value!r}")
    return SettingsError("environment: a value cannot be read")


def _form(model: type[BaseModel], name: str) -> str:
    """Describe the expected form of a variable's value."""
    kind: Any = model
    for part in name[len(ENV_PREFIX) :].lower().split("__"):
        kind = kind.model_fields[part].annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return f"""a JSON list such as '{'["HOST:PORT"]' if part == "schedulers" else "[...]"}'"""
    return f"a JSON object, or one setting of it as {name}__SETTING"
