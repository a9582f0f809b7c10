"""Writes the settings behind the flags as a settings file."""

from collections.abc import Mapping
from typing import Any

from lorrery.cli.serve.settings import Engine
from lorrery.service.files.reading import to_toml
from lorrery.service.settings.cluster import FORMAT, changed
from lorrery.service.settings.reading import merge, nested

_NO_KEYS = "# --api-key: router.keys is a file with the keys' SHA-256, see lorrery keys new --help.\n"


def settings_file(engine: Engine) -> str:
    """Return a settings file with which `lorrery up --config FILE` runs what `lorrery serve` runs."""
    workers = f" --workers {engine.num_workers}"
    head = f"# What the flags amount to; run it with lorrery up{workers} --config FILE.\n"
    if engine.api_keys:
        head += _NO_KEYS
    settings = engine.settings
    scheduler = settings.scheduler
    base: dict[str, object] = {
        "model": settings.model,
        "engine": settings.engine,
        "catalogue": settings.catalogue,
        "worker.gpu": settings.worker.gpu,
        "scheduler.max_req_input_len": scheduler.max_req_input_len,
        "scheduler.max_req_total_len": scheduler.max_req_total_len,
    }
    tables: dict[str, Any] = {"format": FORMAT}
    for key, value in base.items():
        if value not in (None, ()):
            merge(tables, nested(key, value))
    # Values that follow from the engine's preset are not repeated.
    merge(tables, _unlike(settings.model_dump(), changed({}, base).model_dump()))
    return f"{head}\n{to_toml(tables)}"


def _unlike(tables: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(key), Mapping):
            if inner := _unlike(value, defaults[key]):
                found[key] = inner
        elif value != defaults.get(key):
            found[key] = value
    return found
