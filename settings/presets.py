"""Engines by name: what `engine = "vllm"` sets, for the GPU and the model that the settings name.

The values and their sources are in `data/presets.toml`. A preset stands below the single settings of the layer (file,
environment, command line) that names it, and above the layers before.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.settings import merge, nested
from lorrery.chassis.tables import read_tables
from lorrery.worker.device.catalogue import PACKAGE, Catalogue
from lorrery.worker.device.errors import CatalogueError
from lorrery.worker.device.hardware import Gpu

FORMAT = 1
_PACKAGE = "lorrery.settings"
_LENGTHS = ("max_req_input_len", "max_req_total_len")


@dataclass(frozen=True, slots=True)
class EnginePreset:
    """One engine in one version.

    Attributes:
        name: with its version, as settings may spell it.
        title: of the engine, for people.
        source: of the values.
        settings: that it sets, as a settings file's tables.
        unset: settings that have their defaults again, by dotted name.
        by_gpu: rows of what depends on the GPU, see the table; the first that fits counts.
    """

    name: str
    title: str
    source: str
    settings: Mapping[str, Any]
    unset: tuple[str, ...] = ()
    by_gpu: tuple[Mapping[str, Any], ...] = field(default=())

    def tables(self, gpu: Gpu) -> dict[str, Any]:
        """Return what it sets where this GPU serves; None: the default again."""
        found: dict[str, Any] = {}
        for key in self.unset:
            merge(found, nested(key, None))
        merge(found, deepcopy(dict(self.settings)))
        row = next((row for row in self.by_gpu if _fits(row, gpu)), {})
        merge(found, deepcopy(row.get("settings", {})))
        return found


@cache
def presets() -> Mapping[str, Mapping[str, EnginePreset]]:
    """Return engine -> version -> preset; the newest version is the last."""
    found: dict[str, dict[str, EnginePreset]] = {}
    for where, table in read_tables(_PACKAGE):
        assert table.pop("format") == FORMAT, where
        for engine, entry in table.items():
            found[engine] = {}
            for version, own in entry["versions"].items():
                settings = deepcopy(entry["settings"])
                merge(settings, own.get("settings", {}))
                found[engine][version] = EnginePreset(
                    f"{engine}-{version}",
                    entry["title"],
                    own.get("source", entry["source"]),
                    settings,
                    tuple(entry["unset"]),
                    tuple(entry.get("by_gpu", ())),
                )
    return found


def preset(name: str) -> EnginePreset:
    """Return the preset of that name: an engine, or an engine and a version, of which the first numbers count.

    Raises:
        SettingsError: no such engine or version; the message lists those there are.
    """
    engine, _, version = name.partition("-")
    versions = presets().get(engine)
    if versions is None:
        raise SettingsError(
            f"engine: {name!r} is not known; known: {', '.join(presets())}, each with a version if need be, such as"
            f" {_versions('vllm')}"
        )
    if "-" not in name:
        return versions[list(versions)[-1]]
    line = next((known for known in versions if version == known or version.startswith(f"{known}.")), None)
    if line is None:
        raise SettingsError(f"engine: {name!r} is not known in that version; known: {_versions(engine)}")
    return versions[line]


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine runs on, and what it serves: names, and files with further entries of the catalogue."""

    gpu: str
    model: str
    catalogue: tuple[Path, ...] = ()


def preset_tables(name: str, served: Served, later: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine sets, as the tables of a settings file.

    Args:
        name: of the engine.
        served: says what depends on GPU and model.
        later: what is set where the preset is named, or above: it wins.

    Raises:
        SettingsError: no such engine, GPU or model, or a model whose longest request is not known.
    """
    chosen = preset(name)
    scheduler = later.get("scheduler", {})
    if not isinstance(scheduler, Mapping):
        scheduler = {}
    model = None
    try:
        catalogue = Catalogue(read_tables(PACKAGE, served.catalogue)) if served.catalogue else shipped_catalogue()
        found = chosen.tables(catalogue.gpu(served.gpu))
        if any(key not in scheduler for key in _LENGTHS):
            model = catalogue.model(served.model)
    except CatalogueError as error:
        raise SettingsError(f"worker.gpu, model: {error}") from None
    if model is None:
        return found
    if model.max_model_len is None:
        missing = " and ".join(f"scheduler.{key}" for key in _LENGTHS if key not in scheduler)
        raise SettingsError(
            f"engine: {name!r} takes the longest request from the model, and the catalogue has no max_model_len of"
            f" {model.name}: add it there, or set {missing}"
        )
    longest = scheduler.get("max_req_total_len", model.max_model_len)
    pool = scheduler.get("max_total_token_num")
    if "max_req_total_len" not in scheduler and isinstance(pool, int):
        longest = min(longest, pool)
    merge(found, {"scheduler": {"max_req_total_len": longest}})
    if isinstance(longest, int):
        merge(found, {"scheduler": {"max_req_input_len": max(longest - 1, 1)}})
    return found


@cache
def shipped_catalogue() -> Catalogue:
    """Return what ships, read once."""
    return Catalogue(read_tables(PACKAGE))


def _fits(row: Mapping[str, Any], gpu: Gpu) -> bool:
    return gpu.memory_gb >= row.get("min_memory_gb", 0) and not gpu.name.startswith(tuple(row.get("but_not", ())))


def _versions(engine: str) -> str:
    return ", ".join(one.name for one in presets()[engine].values())
